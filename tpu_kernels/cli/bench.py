"""``tpu-kernels bench``: kernels beside their references, on the same inputs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_kernels.cli.argspec import empty_tensor, random_tensors, with_values
from tpu_kernels.cli.arguments import CALL_HELP, call_arguments, targets
from tpu_kernels.cli.kernels import add_import_option, find_function, find_kernel, load_kernels
from tpu_kernels.cli.output import Output
from tpu_kernels.errors import ArgumentError

if TYPE_CHECKING:
    from tpu_kernels.registry.kernel import Kernel
    from tpu_kernels.tuning.bench import BenchRow
    from tpu_kernels.tuning.workload import WorkloadCall

DESCRIPTION = """\
Compare kernels with their references on the same inputs: by the compiler's figures for chips (the
reference is what XLA makes of it, without the kernel), and with --simulated by times on the
simulated device, which say nothing about a TPU. Exit code 1 if a kernel does not work somewhere.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments and options of the subcommand."""
    parser.add_argument("kernel", metavar="KERNEL", nargs="?", help="such as tpu::matmul")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs="*", default=[], help=CALL_HELP)
    parser.add_argument("--workload", type=Path, metavar="FILE", help="all calls of a workload")
    parser.add_argument("--shapes", metavar="NAME", help="the layers of a model, as for `tune`")
    parser.add_argument(
        "--target",
        default="v6e",
        metavar="CHIP[,CHIP...]",
        help="TPU generations, or none (default: %(default)s)",
    )
    parser.add_argument(
        "--simulated",
        action="store_true",
        help="also take times on the device: the TPU that TorchTPU owns, else the simulated one",
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="MODULE:NAME",
        help="also compare with a JAX function of the call's tensors, per chip; FILE.py:NAME works "
        "too; repeatable",
    )
    parser.add_argument("--timeout-s", type=float, default=600.0, metavar="SECONDS")
    add_import_option(parser)


def run(options: argparse.Namespace, output: Output) -> bool:
    """Compare and print; False if a kernel does not work somewhere."""
    from tpu_kernels.tuning import bench

    peers = {name: find_function(name) for name in options.peer}
    chips = [chip for chip in targets(options.target) if chip != "none"]
    rows: list[BenchRow] = []
    for kernel, call, text in _calls(options):
        for chip in chips:
            output.note(f"{kernel.name} {text} for {chip} ...")
            args, kwargs = call(False)
            row = bench.on_chip(kernel, args, kwargs, chip, call=text, timeout_s=options.timeout_s)
            rows.append(row)
            rows += [
                bench.beside_peer(
                    row, peer, name, kernel, args, kwargs, timeout_s=options.timeout_s
                )
                for name, peer in peers.items()
            ]
        if options.simulated:
            output.note(f"{kernel.name} {text} on the device ...")
            args, kwargs = call(True)
            rows.append(bench.on_device(kernel, args, kwargs, call=text))
    columns = ("kernel", "call", "where", "kernel µs", "reference µs", "times faster", "note")
    output.table("", columns, [_row(row) for row in rows])
    if any(row.where == bench.SIMULATED for row in rows):
        output.line("times on the simulated device say nothing about a TPU")
    output.document({"ok": all(r.ok for r in rows), "rows": [row.to_dict() for row in rows]})
    return all(row.ok for row in rows)


def _row(row: BenchRow) -> tuple[object, ...]:
    def shown(value: float | None) -> str | None:
        return None if value is None else f"{value:.2f}"

    times = (shown(row.kernel_us), shown(row.reference_us), shown(row.speedup))
    return (row.kernel, row.call, row.where, *times, row.note or None)


def _calls(options: argparse.Namespace) -> list[tuple[Kernel, Any, str]]:
    """Kernel, a function that makes its arguments (with values or without), and their text."""
    if options.workload is None and options.shapes is None:
        if options.kernel is None:
            raise ArgumentError(
                "bench: what?", hint="name a kernel, --workload FILE or --shapes NAME"
            )
        kernel = find_kernel(options.kernel, options.imports)

        def given(values: bool) -> tuple[Sequence[Any], Mapping[str, Any]]:
            return call_arguments(options.arguments, random_tensors() if values else empty_tensor)

        return [(kernel, given, " ".join(options.arguments))]
    from tpu_kernels.tuning.shape_sets import shape_set
    from tpu_kernels.tuning.workload import Workload

    calls = [
        *(Workload.load(options.workload) if options.workload is not None else ()),
        *(shape_set(options.shapes) if options.shapes is not None else ()),
    ]
    kernels = load_kernels(options.imports)
    return [
        (kernels[call.kernel], _maker(kernels[call.kernel], call), call.origin or str(call))
        for call in calls
        if call.kernel in kernels and options.kernel in (None, call.kernel)
    ]


def _maker(kernel: Kernel, call: WorkloadCall) -> Any:
    def make(values: bool) -> tuple[Sequence[Any], Mapping[str, Any]]:
        arguments = call.bind_arguments(kernel)
        return (), (with_values(arguments) if values else arguments)

    return make
