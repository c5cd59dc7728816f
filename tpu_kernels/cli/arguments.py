"""Options that several commands share: the kernel with the arguments of a call, the target."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tpu_kernels.cli.argspec import TensorSpec, materialize, parse_arguments

if TYPE_CHECKING:
    import torch

CALL_HELP = (
    "argument of the call, positional or NAME=VALUE: a tensor by dtype and sizes "
    "(f32[1024,512], bf16[8]), a list in brackets, or a number, word, true, false, none"
)


def add_call_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``KERNEL [ARGUMENT ...]``."""
    parser.add_argument("kernel", metavar="KERNEL", help="name of the kernel, such as tpu::matmul")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs="*", default=[], help=CALL_HELP)


def add_target_option(parser: argparse.ArgumentParser) -> None:
    """Declare ``--target``."""
    parser.add_argument(
        "--target",
        default="v6e",
        metavar="CHIP[,CHIP...]",
        help="TPU generations: v4, v5e, v5p, v6e, tpu7x (default: %(default)s)",
    )


def add_compile_options(
    parser: argparse.ArgumentParser,
    *,
    timeout_s: float = 600.0,
    limits: str = "time limit of one target",
) -> None:
    """Declare ``--config``, ``--timeout-s`` and ``--no-cache``, of commands that compile."""
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="fix a tunable parameter; repeat for several (default: what a call would use)",
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=timeout_s,
        metavar="SECONDS",
        help=f"{limits} (default: %(default)s)",
    )
    parser.add_argument("--no-cache", action="store_true", help="compile even if a result is known")


def targets(text: str) -> list[str]:
    """Split the value of ``--target``; the compiler knows which names are valid.

    Example:
        >>> targets("v5e,v6e")
        ['v5e', 'v6e']
    """
    return [name.strip() for name in text.split(",") if name.strip()]


def call_arguments(
    words: Sequence[str], make: Callable[[TensorSpec], torch.Tensor]
) -> tuple[list[Any], dict[str, Any]]:
    """Turn words of the command line into the arguments of a call.

    Args:
        words: See `tpu_kernels.cli.argspec`.
        make: Makes the tensor of a spec.

    Returns:
        Positional and keyword arguments, with real tensors.

    Raises:
        ArgumentError: If a word cannot be read.
    """
    positional, named = parse_arguments(words)
    return (
        [materialize(value, make) for value in positional],
        {name: materialize(value, make) for name, value in named.items()},
    )
