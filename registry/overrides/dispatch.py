"""The kernels that stand in the dispatcher while an operator is overridden."""

from __future__ import annotations

import functools
import linecache
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tpu_kernels import _compat_torch as compat
from tpu_kernels.errors import OverrideError
from tpu_kernels.registry.overrides import checked
from tpu_kernels.registry.overrides.chain import (
    BUSY,
    FLAGS,
    LOCK,
    SCOPE_KEY,
    SLOTS,
    UNSAID,
    Slot,
    refresh,
    scoped_chain,
    without,
)
from tpu_kernels.registry.overrides.targets import Site, covered, qualified, signature

# One kernel per site, written out for the operator's own number of arguments: packing them into
# tuples and dictionaries costs more than all the rest. `{optional}` is there only where torch may
# pass more.
_KERNEL = """\
def kernel(keyset{parameters}):
    if FLAGS.slow:
        return slow(slot, keyset, ({positional}{star}), {keywords})
    if FLAGS.scoped:
        try:
            chain = thread_object(SCOPE_KEY).chains[slot]
        except (KeyError, RuntimeError):
            chain = scoped_chain(slot)
    else:
        chain = slot.chain
    busy = BUSY.overrides
    if busy:
        chain = without(chain, busy)
    for link in chain:
{arity}\
        when = link.when
        if when is not None:
            try:
                verdict = when({arguments})
            except Exception as error:
                verdict = link.override.predicate_raised(error)
            if verdict is False:
                link.override.declines += 1
                link.override.last_decline = UNSAID
                continue
            if verdict is not True and not link.override.accepts(verdict):
                continue
        override = link.override
        override.hits += 1
        BUSY.overrides = busy | link.skip if busy else link.skip
        try:
            return link.run({arguments})
        except Exception as error:
            override.implementation_raised(error)
        finally:
            BUSY.overrides = busy
    return original(keyset{comma}{arguments})
"""
_ARITY = """\
        if ({excess}) and not link.override.takes({count} + len(rest), kw):
            continue
"""


def write_kernel(slot: Slot) -> Callable[..., Any]:
    """Write the kernel of a slot.

    Args:
        slot: With `original` set.

    Returns:
        A function ``kernel(keyset, *args, **kwargs)`` for `torch.library.Library.impl(...,
        with_keyset=True)`.
    """
    shape = signature(slot.site.op)
    names = [f"a{i}" for i in range(shape.required)]
    star = ["*rest"] if shape.optional else []
    parameters = names + star
    if shape.keywords and not star:
        parameters.append("*")
    parameters += list(shape.keywords) + (["**kw"] if shape.optional else [])
    passed = (
        names + star + [f"{k}={k}" for k in shape.keywords] + (["**kw"] if shape.optional else [])
    )
    items = [f"{k!r}: {k}" for k in shape.keywords] + (["**kw"] if shape.optional else [])
    source = _KERNEL.format(
        parameters="".join(f", {p}" for p in parameters),
        positional="".join(f"{n}, " for n in names),
        star=star[0] if star else "",
        keywords="{" + ", ".join(items) + "}",
        arity=_ARITY.format(excess="rest or kw", count=len(names)) if shape.optional else "",
        arguments=", ".join(passed),
        comma=", " if passed else "",
    )
    file = f"<override of {qualified(slot.site.op)} at {slot.site.key}>"
    # Tracebacks through the written code then show it.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {
        "FLAGS": FLAGS,
        "BUSY": BUSY,
        "SCOPE_KEY": SCOPE_KEY,
        "UNSAID": UNSAID,
        "slot": slot,
        "slow": checked.call,
        "thread_object": compat.thread_object,
        "scoped_chain": scoped_chain,
        "without": without,
        "original": slot.original,
    }
    exec(_compiled(source, file), namespace)
    kernel: Callable[..., Any] = namespace["kernel"]
    return kernel


@functools.lru_cache(maxsize=4096)
def _compiled(source: str, file: str) -> types.CodeType:
    # Python needs 2 ms for it, and a `with` block may be entered in a loop.
    return compile(source, file, "exec")


def acquire(sites: list[Site]) -> None:
    """Make sure that the kernels of these sites are ours, and count one more user."""
    with LOCK:
        for device in {site.device for site in sites}:
            _prepare(device)
        # All originals first: a kernel at the backend key changes what the autograd key resolves
        # to.
        fresh = [site for site in sites if (qualified(site.op), site.key) not in SLOTS]
        slots = [Slot(site) for site in fresh]
        for slot in slots:
            slot.original = _original(slot.site)
        for slot in slots:
            _install(slot)
            SLOTS[qualified(slot.site.op), slot.site.key] = slot
        for site in sites:
            SLOTS[qualified(site.op), site.key].users += 1
        refresh()


def _original(site: Site) -> Callable[..., Any]:
    """The kernel at a site; an override may also stand where there is none."""
    try:
        kernel: Callable[..., Any] = torch.library.get_kernel(site.op, site.key).call_boxed
    except RuntimeError:
        name = qualified(site.op)

        def missing(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(
                f"{name} has no implementation on {site.device}, and no override took the call"
            )

        return missing
    return kernel


def release(sites: list[Site]) -> None:
    """Count one user less, and give the dispatcher back its own kernels where none is left."""
    with LOCK:
        for site in reversed(sites):
            slot = SLOTS[qualified(site.op), site.key]
            slot.users -= 1
            if slot.users == 0:
                del SLOTS[qualified(site.op), site.key]
                _uninstall(slot)
        refresh()


def _prepare(device: str) -> None:
    if device == "tpu" and compat.privateuse1_name() != "tpu":
        raise OverrideError(
            'override(..., device="tpu"): there is no "tpu" device in this process yet',
            hint="first import tpu_kernels.device (simulated), or import torch_tpu (real)",
        )


def _install(slot: Slot) -> None:
    op, key = slot.site.op, slot.site.key
    covered[qualified(op), key] = compat.has_kernel(op, key)
    library = torch.library.Library(op.namespace, "IMPL")
    with warnings.catch_warnings():
        # torch warns at the first kernel per process that replaces another; here that is the
        # purpose.
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl(qualified(op).partition("::")[2], write_kernel(slot), key, with_keyset=True)
    slot.library = library
    compat.forget_dispatch(op, key)


def _uninstall(slot: Slot) -> None:
    if slot.library is not None:
        compat.destroy_library(slot.library)
    covered.pop((qualified(slot.site.op), slot.site.key), None)
    compat.forget_dispatch(slot.site.op, slot.site.key)
    linecache.cache.pop(f"<override of {qualified(slot.site.op)} at {slot.site.key}>", None)
