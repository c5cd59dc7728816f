"""Pass "vmem": kernels that cannot fit into a target's vector memory, refused at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tpu_kernels import _compat_jax
from tpu_kernels.compiler import Target
from tpu_kernels.compiler.pallas_model import PallasModel, pallas_models
from tpu_kernels.compiler.report import mib
from tpu_kernels.errors import KernelError
from tpu_kernels.verify.report import CheckRow
from tpu_kernels.verify.subject import Subject, failed

NAME = "vmem"
_RESERVED = 64 << 10  # the compiler never gives away the last of it ("of 127.94M" on a v6e)
_SEARCH_S = 0.6
_HEADROOM = 1.25  # for the compiler's temporaries, where the limit is raised


def run(subject: Subject, target: Target, jaxpr: Any) -> tuple[CheckRow, int | None]:
    """Compare what the Pallas calls need at least with what the target has.

    Args:
        subject: The program.
        target: The TPU.
        jaxpr: The program traced for it.

    Returns:
        The row, and the limit in bytes to compile with where the program needs more than the
        default and names none itself.
    """
    models = pallas_models(jaxpr)
    if not models:
        has = _compat_jax.has_pallas_call(jaxpr)
        why = "its Pallas kernels have no blocks that could be listed"
        return CheckRow(NAME, "skipped", why if has else "the program calls no Pallas kernel"), None
    largest = max(models, key=lambda model: model.vmem_bytes)
    broken = next((model for model in models if _excess(model, target) is not None), None)
    if broken is not None:
        return _refusal(subject, target, broken), None
    chip = target.chip
    need = max((m.vmem_bytes for m in models if m.vmem_limit is None), default=0)
    what = f"needs at least {mib(largest.vmem_bytes)} of {mib(chip.vmem_bytes)}"
    if need <= chip.vmem_default_limit_bytes:
        return CheckRow(NAME, "ok", what), None
    limit = min(chip.vmem_bytes - _RESERVED, int(need * _HEADROOM) + (1 << 20))
    what += (
        f", more than the default limit of {mib(chip.vmem_default_limit_bytes)}; compiled with a "
        f"limit of {mib(limit)}"
    )
    hint = f"set compiler_params=pltpu.CompilerParams(vmem_limit_bytes={limit}) in the kernel"
    return CheckRow(NAME, "ok", what, largest.where or None, hint=hint), limit


def _excess(model: PallasModel, target: Target) -> int | None:
    """The limit that a call exceeds, whatever the default is set to; None if it may fit."""
    most = target.chip.vmem_bytes - _RESERVED
    limit = most if model.vmem_limit is None else min(most, model.vmem_limit)
    return limit if model.vmem_bytes > limit else None


def _refusal(subject: Subject, target: Target, model: PallasModel) -> CheckRow:
    limit = _excess(model, target) or 0
    own = model.vmem_limit is not None and model.vmem_limit <= limit
    which = "its vmem_limit_bytes is" if own else f"{target.name} has"
    lines = [
        f"out of VMEM: kernel {model.name!r} needs at least {mib(model.vmem_bytes)}, "
        f"{which} {mib(limit)}"
    ]
    lines += [subject.with_names(line) for line in model.buffers()]
    fits = _smaller(subject, target)
    hint = "use smaller blocks or fewer buffers"
    if fits:
        hint = "; or ".join(f"{name}={value!r} fits" for name, value in fits.items())
    return failed(NAME, "\n".join(lines), model.where or subject.where, hint)


def _smaller(subject: Subject, target: Target) -> dict[str, Any]:
    """The largest halved value of each static argument alone that makes the program fit."""
    if subject.bound is None:
        return {}
    bound = subject.bound
    values = {**bound.static, **bound.choice(target.chip.name).config}
    deadline = time.perf_counter() + _SEARCH_S
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in found:
            continue
        for smaller in _halved(value):
            if time.perf_counter() > deadline:
                return found
            if _fits(subject, target, {name: smaller}):
                found[name] = smaller
                break
    return found


def _halved(value: Any) -> Iterator[Any]:
    if isinstance(value, int) and not isinstance(value, bool):
        while value > 1:
            value //= 2
            yield value
    elif isinstance(value, Sequence) and all(isinstance(v, int) for v in value):
        for axis, size in enumerate(value):
            for smaller in _halved(size):
                yield type(value)([*value[:axis], smaller, *value[axis + 1 :]])  # type: ignore[call-arg]


def _fits(subject: Subject, target: Target, change: Mapping[str, Any]) -> bool:
    from tpu_kernels.compiler.pallas_grid import trace

    try:
        program = subject.rebind(change)
        models = pallas_models(trace(program.function_for(target), program.avals, target))
    except (KernelError, ValueError, TypeError, ArithmeticError, AssertionError, IndexError):
        return False  # the kernel does not take this value
    return bool(models) and all(_excess(model, target) is None for model in models)
