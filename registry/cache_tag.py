"""Caches of compiled graphs on disk notice when a kernel, an override or a tuned config changes.

torch keeps compiled graphs on disk, keyed by the graph (AOTAutograd's cache, Inductor's, and
through the former TorchTPU's executables). A kernel is one node of it, known by its name; what the
kernel computes, the operators that its gradient is made of, and which configuration it takes are
not in the key, so that the next process would be handed a program of before the change. torch's
public answer is ``torch.compiler.config.cache_key_tag``, a text that goes into every key. Before
each graph is compiled, the content of all registered kernels and of whatever else adds a source
here is appended to it; what the user put there stays in front.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import weakref
from collections.abc import Callable
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from tpu_kernels import _compat_torch as compat
from tpu_kernels.registry import config_table, kernel_hooks, naming

if TYPE_CHECKING:
    from tpu_kernels.registry.kernel import Kernel

MARK = ";tpu_kernels:"
_PACKAGES = ("tpu_kernels", "jax", "jaxlib", "libtpu", "torch_tpu")

_lock = threading.Lock()
_sources: dict[str, Callable[[], str]] = {}
_watching = False
_contents: weakref.WeakKeyDictionary[Kernel, tuple[int, str]] = weakref.WeakKeyDictionary()


def add_source(name: str, fingerprint: Callable[[], str]) -> None:
    """Make something part of the tag.

    Args:
        name: Identifies it; a second one of the same name replaces the first.
        fingerprint: Called before each compilation, in its thread; empty text counts as nothing.
    """
    _sources[name] = fingerprint
    watch()


def watch() -> None:
    """Set the tag before every graph that Dynamo compiles from now on."""
    global _watching
    with _lock:
        if not _watching:
            _watching = True
            compat.before_every_graph(set_tag)


def install() -> None:
    """Watch from the first kernel on."""
    kernel_hooks.add_hook("cache_tag", lambda _: watch())


def set_tag() -> None:
    """Bring ``torch.compiler.config.cache_key_tag`` up to date."""
    config: Any = torch.compiler.config
    users = config.cache_key_tag.partition(MARK)[0]
    content = fingerprint()
    config.cache_key_tag = f"{users}{MARK}{content}" if content else users


def fingerprint() -> str:
    """A digest of everything that a cached graph must agree with; empty if there is nothing.

    The same in each process that defines the same.
    """
    kernels = naming.kernels()
    parts = [f"{name}={value}" for name, source in sorted(_sources.items()) if (value := source())]
    if kernels:
        parts += [f"{name}={_content(kernels[name])}" for name in sorted(kernels)]
        parts.append(config_table.fingerprint(sorted(kernels)))
    if not parts:
        return ""
    return hashlib.blake2b("\n".join([*parts, _versions()]).encode(), digest_size=12).hexdigest()


def _content(kernel: Kernel) -> str:
    """A digest of a kernel, its reference, and of what was registered with it by hand."""
    known = _contents.get(kernel)
    if known is None or known[0] != len(kernel.customised):
        from tpu_kernels.dsl.source import digest

        spec = kernel.spec
        rest = (spec.reference, spec.backward, spec.autocast, spec.precision, kernel.customised)
        known = _contents[kernel] = (len(kernel.customised), f"{spec.source.digest}{digest(rest)}")
    return known[1]


@functools.cache
def _versions() -> str:
    return " ".join(f"{name}={_version(name)}" for name in _PACKAGES)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"
