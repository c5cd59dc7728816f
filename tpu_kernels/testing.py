"""Tests of kernels in one line each, run by the pytest plugin of this package.

Importing this module costs next to nothing: neither torch nor JAX is imported by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_kernels.errors import ArgumentError

Arguments = tuple[Any, ...] | Mapping[str, Any]
"""Positional arguments of a call, or arguments by name."""


@dataclass(frozen=True)
class Plan:
    """What shall be checked of a kernel.

    Attributes:
        kernel: A registered kernel, or a JAX function.
        targets: TPU generations to compile for.
        passes: Passes of `tpu_kernels.check`; None for those that run without a target, and the
            compiler where there are targets.
        config: Tunable parameters, None for the kernel's own choice.
        shrink_s: Seconds to look for the smallest failing call, None for the command line's.
        timeout_s: Seconds for a run in another process, and for a compilation.
    """

    kernel: Callable[..., Any]
    targets: tuple[str, ...] = ()
    passes: tuple[str, ...] | None = None
    config: Mapping[str, Any] | None = None
    shrink_s: float | None = None
    timeout_s: float = 300.0


@dataclass(frozen=True)
class KernelTest:
    """Tests of a kernel, one for each call and pass; bind it to a name that begins with ``test``.

    Attributes:
        plan: What is checked.
        cases: The calls by name.
    """

    plan: Plan
    cases: Mapping[str, Arguments | Callable[[], Arguments]]
    __test__ = False  # the plugin collects instances, not this class


def kernel_test(
    kernel: Callable[..., Any],
    args: Arguments | Callable[[], Arguments] | None = None,
    *,
    cases: Mapping[str, Arguments | Callable[[], Arguments]] | None = None,
    targets: Sequence[str] | str = (),
    passes: Sequence[str] | str | None = None,
    config: Mapping[str, Any] | None = None,
    shrink_s: float | None = None,
    timeout_s: float = 300.0,
) -> KernelTest:
    """Test a kernel with pytest, in one line.

    Each pass becomes a test of its own, such as ``test_scale[numerics]``, each target as well
    (``test_scale[compile-v6e]``). A failure says what is wrong, the line of the kernel, and the
    smallest call that still fails.

    Args:
        kernel: A registered kernel, or a JAX function.
        args: Positional arguments as a tuple, arguments by name as a dictionary, or a function that
            makes them when the test runs.
        cases: Several calls by name, in place of `args`.
        targets: TPU generations to compile for; tests of these are skipped where libtpu is absent.
        passes: Passes of `tpu_kernels.check`. By default those that it runs without a target, and
            the compiler where there are targets.
        config: Tunable parameters; by default the kernel's own choice.
        shrink_s: Seconds to spend on the smallest failing call; by default what the command line
            says (``--tpu-shrink-s``), 20.
        timeout_s: Seconds that a run in another process, or a compilation, may take.

    Returns:
        What pytest collects. Bind it to a name that begins with ``test``.

    Raises:
        ArgumentError: If both or none of `args` and `cases` are given.

    Example:
        >>> import jax, torch
        >>> def double(x: jax.Array) -> jax.Array:
        ...     return 2 * x
        >>> test_double = kernel_test(double, (torch.ones(8, 128),), targets=["v5e", "v6e"])
        >>> list(test_double.cases), test_double.plan.targets
        ([''], ('v5e', 'v6e'))
    """
    if (args is None) == (cases is None):
        raise ArgumentError(
            "a kernel test takes either args or cases",
            hint="args=(x, y) for one call, cases={'small': (x, y), ...} for several",
        )
    plan = Plan(kernel, _names(targets), None if passes is None else _names(passes))
    plan = dataclasses.replace(plan, config=config, shrink_s=shrink_s, timeout_s=timeout_s)
    return KernelTest(plan, dict(cases) if cases is not None else {"": args or ()})


def _names(names: Sequence[str] | str) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
