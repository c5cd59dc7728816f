"""How a call finds a tuned config: tuned for exactly this, tuned nearby, shipped with the package.

The registry asks the one `TunedConfigs` source when a kernel meets a new combination of shapes and
static values, and remembers the answer; `config_table.bump` makes it ask again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tpu_kernels.compiler.versions import jax_version, libtpu_version
from tpu_kernels.config import settings
from tpu_kernels.errors import ArgumentError
from tpu_kernels.registry import config_table
from tpu_kernels.registry.config_table import ConfigChoice, ConfigRequest
from tpu_kernels.tuning.cache import TuningCache
from tpu_kernels.tuning.nearest import Neighbour, nearest
from tpu_kernels.tuning.records import Record, canonical, digest, encode, frozen
from tpu_kernels.tuning.tables import table

if TYPE_CHECKING:
    from tpu_kernels.registry.kernel import Kernel

CPU = "cpu"
"""Target of records that were timed on this machine's CPU; they say nothing about a TPU."""


def exact_key(request: ConfigRequest, target: str | None = None) -> dict[str, Any]:
    """Return the key of the record for exactly these shapes, dtypes and static values.

    Args:
        request: What is asked for.
        target: Another target than the request's.

    Example:
        >>> arrays = (((8, 128), "float32"),)
        >>> request = ConfigRequest("ns::f", "abc", arrays, {"causal": True}, "v6e")
        >>> exact_key(request)["arrays"], exact_key(request)["target"]
        ([[[8, 128], 'float32']], 'v6e')
    """
    return {
        "kernel": request.kernel,
        "source_hash": request.source_hash,
        "target": target or request.target,
        "arrays": encode(request.arrays),
        "static": encode(dict(request.static), where="static"),
    }


def bucket_key(request: ConfigRequest, target: str | None = None) -> dict[str, Any] | None:
    """Return the key of the record for the author's bucket of these arguments, None without one.

    The bucket stands for the shapes; dtypes and static values stay in the key.
    """
    if request.bucket is None:
        return None
    key = exact_key(request, target)
    key["dtypes"] = [dtype for _, dtype in key.pop("arrays")]
    return key | {"bucket": encode(request.bucket, where="bucket")}


def cache_key(kernel: Kernel, args: Sequence[Any] | None = None, **kwargs: Any) -> str:
    """Return the identity of a kernel, or of one of its calls, for caches of one's own.

    It changes with the code (helpers, globals and closures that the kernel reads included), the
    versions of JAX and of the compiler and, with arguments, with shapes, dtypes, static values and
    the simulated chip. Comments and moved lines do not count.

    Args:
        kernel: What `tpu_kernel` returned.
        args: Positional arguments of a call.
        **kwargs: Arguments by name.

    Returns:
        64 hexadecimal digits.

    Example:
        >>> import jax, torch
        >>> import tpu_kernels as tk
        >>> @tk.tpu_kernel("doc::keyed")
        ... def keyed(x: jax.Array) -> jax.Array:
        ...     return x + 1
        >>> cache_key(keyed, [torch.ones(2)]) == cache_key(keyed, [torch.zeros(2)])
        True
        >>> cache_key(keyed, [torch.ones(2)]) == cache_key(keyed, [torch.ones(3)])
        False
    """
    key: dict[str, Any] = {"kernel": kernel.name, "source_hash": kernel.spec.source.digest}
    if args is not None or kwargs:
        bound = kernel.bind(*(args or ()), **kwargs)
        key |= exact_key(bound.request(settings().sim_chip))
        # What a caller fixes is part of the call, though a tuned config may fill it in.
        key["static"] = encode(bound.static, where="static")
    versions = {"jax": jax_version(), "libtpu": libtpu_version()}
    return digest(encode(key | {"versions": versions}))


class TunedConfigs:
    """The config source of the tuning layer.

    Args:
        caches: Asked in order.
    """

    def __init__(self, *caches: TuningCache) -> None:
        self._caches = list(caches)
        self._lock = threading.Lock()

    def add(self, cache: TuningCache) -> None:
        """Ask a cache first from now on; one of the same folder is replaced."""
        with self._lock:
            others = [c for c in self._caches if c.path != cache.path]
            self._caches = [cache, *others]

    @property
    def caches(self) -> list[TuningCache]:
        """The caches in the order asked; the default one comes last."""
        with self._lock:
            own = list(self._caches)
        default = TuningCache()
        return own if any(c.path == default.path for c in own) else [*own, default]

    def find(self, request: ConfigRequest) -> ConfigChoice | None:
        """Return the best known config for a request, None if nothing is known.

        Args:
            request: The registry's question.

        Returns:
            A choice with provenance ``"tuned"``, ``"bucket"`` or ``"shipped"`` and the reason.
        """
        try:
            key, cpu_key = exact_key(request), exact_key(request, CPU)
            buckets = [bucket_key(request), bucket_key(request, CPU)]
        except ArgumentError:
            return None  # a static value without a stable spelling: such calls cannot be tuned
        caches = self.caches
        for wanted in (key, cpu_key):
            for cache in caches:
                if (record := cache.get(wanted)) is not None:
                    return _choice(
                        record, "tuned", f"tuned for exactly this call{_measured(record)}"
                    )
        for bucket in filter(None, buckets):
            for cache in caches:
                if (record := cache.get(bucket)) is not None:
                    reason = f"tuned for the same bucket {request.bucket!r}{_measured(record)}"
                    return _choice(record, "bucket", reason)
        return self._near(request, key) or self._shipped(request, key)

    def explain(self, request: ConfigRequest) -> str:
        """Say which record a request finds or, field by field, why it finds none."""
        try:
            key = exact_key(request)
        except ArgumentError as error:
            return str(error)
        found = [cache.explain(key) for cache in self.caches]
        best = min(found, key=lambda e: (not e.hit, e.nearest is None, len(e.differences)))
        lines = [str(best)]
        if any(difference.field == "source_hash" for difference in best.differences):
            lines.append(
                "  source_hash: the code of the kernel or of a helper was edited after tuning, or "
                "another version of a library is installed"
            )
        if not best.hit and (shipped := table(request.target, request.kernel)):
            lines.append(f"the table shipped for {request.target} has {len(shipped)} entries")
        return "\n".join(lines)

    def fingerprint(self, kernels: Sequence[str]) -> str:
        """Return a digest of the records of some kernels; shipped tables come with our version.

        Args:
            kernels: Qualified names.
        """
        hasher = hashlib.blake2b(digest_size=8)
        for cache in self.caches:
            for kernel in kernels:
                for record in cache.records(kernel):
                    hasher.update(f"{record.digest}{canonical(encode(record.config))}".encode())
        return hasher.hexdigest()

    def _near(self, request: ConfigRequest, key: Mapping[str, Any]) -> ConfigChoice | None:
        records = [r for cache in self.caches for r in cache.records(request.kernel)]
        neighbours = [n for r in records if (n := _neighbour(r, key)) is not None]
        found = nearest(request.arrays, neighbours)
        if found is None:
            return None
        shapes = ", ".join(str(list(shape)) for shape, _ in found.arrays)
        reason = f"tuned for the nearby shapes {shapes}; not tuned for exactly this call"
        return ConfigChoice(frozen(found.config), "bucket", reason)

    def _shipped(self, request: ConfigRequest, key: Mapping[str, Any]) -> ConfigChoice | None:
        shipped = table(request.target, request.kernel)
        entries = [
            n for n in shipped if canonical(encode(dict(n.static))) == canonical(key["static"])
        ]
        found = nearest(request.arrays, entries)
        if found is None:
            return None
        shapes = ", ".join(str(list(shape)) for shape, _ in found.arrays)
        exact = encode(found.arrays) == key["arrays"]
        what = "exactly these shapes" if exact else f"the nearby shapes {shapes}"
        reason = f"from the table shipped for {request.target}, {what}"
        return ConfigChoice(frozen(found.config), "shipped", reason)


def _choice(record: Record, provenance: str, reason: str) -> ConfigChoice:
    return ConfigChoice(frozen(record.config), provenance, reason)


def _measured(record: Record) -> str:
    how = record.provenance.get("objective", "")
    if isinstance(record.key, dict) and record.key.get("target") == CPU:
        how = "wall time on the CPU, which says nothing about a TPU"
    day = record.created[:10]
    return "".join([f" by {how}" if how else "", f" on {day}" if day else ""])


def _neighbour(record: Record, key: Mapping[str, Any]) -> Neighbour | None:
    """A record of the same kernel, source, target and static values, whatever its shapes."""
    stored = record.key
    if not isinstance(stored, dict) or "arrays" not in stored:
        return None
    # By their canonical text: Python takes True, 1 and 1.0 for the same.
    names = ("source_hash", "target", "static")
    if any(canonical(stored.get(name)) != canonical(key[name]) for name in names):
        return None
    arrays = tuple((tuple(shape), dtype) for shape, dtype in stored["arrays"])
    return Neighbour(arrays, record.config)


_source = TunedConfigs()


def source() -> TunedConfigs:
    """Return the source that `install` gives to the registry."""
    return _source


def install() -> None:
    """Let every kernel ask for tuned configs; calling it again changes nothing."""
    config_table.add_config_source(_source)
    if (folder := settings().record) is not None:
        from tpu_kernels.tuning import recording

        recording.record_process(folder)


def store(
    request: ConfigRequest,
    cache: TuningCache,
    config: Mapping[str, Any],
    time_us: float | None,
    **provenance: Any,
) -> None:
    """Keep a chosen config for exactly this request, and for its bucket, and use it from now on.

    Args:
        request: What was tuned; its target is the key's.
        cache: Where to keep it.
        config: The choice.
        time_us: Its time in µs, if measured.
        **provenance: What else to keep.
    """
    cache.put(exact_key(request), config, time_us, **provenance)
    if (key := bucket_key(request)) is not None:
        cache.put(key, config, time_us, **provenance, arrays=encode(request.arrays))
    _source.add(cache)
    install()
    config_table.bump()


def for_target(request: ConfigRequest, target: str) -> ConfigRequest:
    """Return the same request for another target."""
    return dataclasses.replace(request, target=target)


def known(request: ConfigRequest) -> Iterator[Record]:
    """Iterate over all records of a request's kernel in the caches in use."""
    for cache in _source.caches:
        yield from cache.records(request.kernel)
