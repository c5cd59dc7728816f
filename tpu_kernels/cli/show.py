"""``tpu-kernels show``: everything known of one kernel and, for given arguments, its config."""

from __future__ import annotations

import argparse
import inspect
from typing import TYPE_CHECKING, Any

from tpu_kernels.cli.argspec import empty_tensor
from tpu_kernels.cli.arguments import add_call_arguments, call_arguments
from tpu_kernels.cli.kernels import add_import_option, find_kernel
from tpu_kernels.cli.list import describe
from tpu_kernels.cli.output import Output, output_path
from tpu_kernels.errors import ArgumentError

if TYPE_CHECKING:
    from tpu_kernels.dsl.spec import Parameter
    from tpu_kernels.registry.kernel import Kernel

DESCRIPTION = """\
Show what is known of a kernel. With the arguments of a call, show which configuration that call
would use, and why.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments and options of the subcommand."""
    add_call_arguments(parser)
    parser.add_argument(
        "--code",
        action="store_true",
        help="print the Pallas code that Helion generates for the call's arguments",
    )
    add_import_option(parser)


def run(options: argparse.Namespace, output: Output) -> bool:
    """Print the kernel; an unknown one is an error."""
    kernel = find_kernel(options.kernel, options.imports)
    facts = describe_fully(kernel)
    if options.arguments:
        args, kwargs = call_arguments(options.arguments, empty_tensor)
        choice = kernel.config_for(*args, **kwargs)
        facts["choice"] = {
            "config": dict(choice.config),
            "provenance": choice.provenance,
            "reason": choice.reason,
        }
    if options.code:
        facts["code"] = generated_code(kernel, options.arguments)
    output.document(facts)
    if options.code:
        output.line(facts["code"])
    else:
        _print(facts, output)
    return True


def generated_code(kernel: Kernel, arguments: list[str]) -> str:
    """The Pallas code of a Helion kernel for a call.

    Raises:
        ArgumentError: The kernel is not Helion's, or there are no arguments.
    """
    code_for = getattr(kernel.spec.jax_fn, "code", None)
    if code_for is None:
        raise ArgumentError(
            f"{kernel.name} is written in {kernel.spec.language}: there is no generated code",
            where=str(kernel.spec.source),
        )
    if not arguments:
        raise ArgumentError(
            "--code needs the arguments of a call: Helion generates code for their shapes",
            hint=f"tpu-kernels show {kernel.name} 'f32[256,512]' --code",
        )
    from tpu_kernels.registry.layout import fill
    from tpu_kernels.registry.programs import named_values

    args, kwargs = call_arguments(arguments, empty_tensor)
    bound = kernel.bind(*args, **kwargs)
    values = named_values(
        kernel.spec.op_parameters,
        fill(bound.call.layout, bound.avals),
        bound.dynamics,
        {**bound.static, **bound.config},
    )
    return str(code_for(values))


def describe_fully(kernel: Kernel) -> dict[str, Any]:
    """All facts of a kernel that do not depend on a call, ready for JSON."""
    spec = kernel.spec
    return describe(kernel) | {
        "parameters": [_describe_parameter(p) for p in spec.op_parameters],
        "mutates": list(spec.mutates_args),
        "donates": list(spec.donate_args),
        "backward": spec.backward or "none",
        "vmap": spec.vmap or "none",
        "reference": getattr(spec.reference, "__qualname__", None),
        "declared_configs": _printable(spec.configs),
        "digest": spec.source.digest,
        "doc": inspect.cleandoc(spec.doc).partition("\n")[0] if spec.doc else None,
    }


def _describe_parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "type": parameter.schema_type,
        "kind": "tunable" if parameter.tunable else parameter.kind.name.lower().replace("_", " "),
        "default": None if parameter.required else str(parameter.default),
    }


def _printable(configs: Any) -> Any:
    """Configs are a mapping, a list, or a function that makes one of them for given arguments."""
    return getattr(configs, "__qualname__", configs)


def _print(facts: dict[str, Any], output: Output) -> None:
    output.line(f"{facts['name']}{facts['schema'].removeprefix(facts['name'].split('::')[1])}")
    if facts["doc"]:
        output.line(facts["doc"])
    rows = [(p["name"], p["type"], p["kind"], p["default"]) for p in facts["parameters"]]
    output.table("Parameters", ("name", "type", "kind", "default"), rows)
    shown = (
        ("language", facts["language"]),
        ("defined at", output_path(facts["source"])),
        ("digest", facts["digest"][:16]),
        ("mutates", ", ".join(facts["mutates"]) or None),
        ("donates", ", ".join(facts["donates"]) or None),
        ("backward", facts["backward"]),
        ("vmap", facts["vmap"]),
        ("reference", facts["reference"]),
        ("configs", facts["declared_configs"]),
    )
    output.table("Facts", ("", ""), shown)
    if choice := facts.get("choice"):
        config = ", ".join(f"{k}={v}" for k, v in choice["config"].items()) or "nothing to choose"
        row = (config, choice["provenance"], choice["reason"])
        output.table("Config of this call", ("config", "from", "why"), [row])
