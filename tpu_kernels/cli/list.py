"""``tpu-kernels list``: every kernel, with its operator schema and where it is defined."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from tpu_kernels.cli.kernels import add_import_option, load_kernels
from tpu_kernels.cli.output import Output, output_path

if TYPE_CHECKING:
    from tpu_kernels.registry.kernel import Kernel

DESCRIPTION = "List the kernels with their operator schemas. Importing them runs no kernel."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    add_import_option(parser)


def run(options: argparse.Namespace, output: Output) -> bool:
    """Print the kernels; True also if there are none."""
    rows = [describe(kernel) for kernel in load_kernels(options.imports).values()]
    output.document({"kernels": rows})
    columns = ("kernel", "takes and returns", "tunable", "language", "defined at")
    output.table("", columns, [_row(row) for row in rows])
    return True


def _row(facts: dict[str, Any]) -> tuple[object, ...]:
    """The cells of a table, without what the schema repeats: the name, and the tunables."""
    tunables = facts["tunables"]
    signature = facts["schema"].removeprefix(facts["name"].partition("::")[2])
    for name in tunables:
        signature = re.sub(rf", [^ ,]+ {name}(=\[[^]]*\]|=[^,)]*)?(?=[,)])", "", signature)
    signature = signature.replace(", *)", ")")
    return (
        facts["name"],
        signature,
        ", ".join(tunables) or None,
        facts["language"],
        output_path(facts["source"]),
    )


def describe(kernel: Kernel) -> dict[str, Any]:
    """The facts that a list shows of one kernel, ready for JSON."""
    spec = kernel.spec
    return {
        "name": spec.name,
        "schema": spec.schema,
        "language": spec.language,
        "tunables": list(spec.tunables),
        "source": str(spec.source),
    }
