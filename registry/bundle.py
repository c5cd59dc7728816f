"""Bundles: kernels in one file, for processes that have this package but not the kernels' code.

An exported program (`torch.export.save`) holds the names of operators only. A bundle written beside
it holds what registers them again, for every shape and on every backend: the kernel's specification
with its functions, pickled by value. A lowered program instead of code would fix the shapes, since
Pallas grids are numbers.

A bundle is a zip archive: ``manifest.json`` (versions; for each kernel its name, schema, source
digest, and the hash of its payload) and one payload per kernel. **Loading runs code of the file**,
as `torch.load(weights_only=False)` does: load only what you trust, or pass the digest that
`save_bundle` returned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import pickle
import secrets
import sys
import threading
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

from tpu_kernels import __version__
from tpu_kernels.compiler import locations
from tpu_kernels.compiler.pickling import named_code
from tpu_kernels.compiler.versions import jax_version
from tpu_kernels.errors import ArgumentError, BundleError, KernelError, NameClashError
from tpu_kernels.registry import naming
from tpu_kernels.registry.kernel import Kernel, register

FORMAT = 1
KIND = "tpu_kernels bundle"
_MANIFEST = "manifest.json"
_OWN = __name__.partition(".")[0]
_NAMELESS = "<dynamic-code>"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # equal contents make equal files

_lock = threading.Lock()  # by-value registration is global to cloudpickle


@dataclasses.dataclass(frozen=True)
class BundledKernel:
    """What a manifest says of one kernel.

    Attributes:
        name: ``"namespace::op"``.
        schema: Torch schema without the namespace.
        digest: Hash of everything that decides what the kernel computes.
        language: ``"jax"``, ``"helion"``, ...
        backward: The kernel's backward policy.
        vmap: The kernel's batching policy.
        source: Where the kernel was defined.
        payload: Name of the archive's member that holds it.
        sha256: Hash of the payload.
    """

    name: str
    schema: str
    digest: str
    language: str
    backward: str | None
    vmap: str | None
    source: str
    payload: str
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a bundle says of itself; reading it runs no code of the file.

    Attributes:
        tpu_kernels: Version of this package that wrote it.
        python: ``"3.11"``: bytecode of another minor version cannot be loaded.
        jax: Version of JAX.
        torch: Version of torch.
        kernels: The kernels; one that calls another comes after it.
    """

    tpu_kernels: str
    python: str
    jax: str
    torch: str
    kernels: tuple[BundledKernel, ...]


# -------------------------------------------------------------------------------------- saving
def save_bundle(path: str | os.PathLike[str], kernels: Kernel | Iterable[Kernel]) -> str:
    """Write kernels into one file from which `load` registers them in another process.

    Kernels that these call are included. The code of the kernels' own packages, and of modules that
    are not installed, travels in the file; installed libraries must be installed there too.

    Args:
        path: The file to write; replaced in one step if it exists.
        kernels: One kernel or several.

    Returns:
        The SHA-256 digest of the file, for ``load(path, digest=...)``.

    Raises:
        ArgumentError: Something is not a kernel, or was replaced by a later definition.
        BundleError: A kernel refers to something that cannot be pickled; names both.

    Example:
        >>> import jax, tempfile, os
        >>> from tpu_kernels.registry.decorator import tpu_kernel
        >>> @tpu_kernel("doc::cubed")
        ... def cubed(x: jax.Array) -> jax.Array:
        ...     return x ** 3
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = os.path.join(folder, "kernels.bundle")
        ...     digest = save_bundle(file, [cubed])
        ...     list(load(file, digest=digest))
        ['doc::cubed']
    """
    wanted = [kernels] if isinstance(kernels, Kernel) else list(kernels)
    if not wanted:
        raise ArgumentError("save_bundle: no kernels were given")
    payloads: dict[str, tuple[Kernel, bytes]] = {}
    for kernel in wanted:
        _add(kernel, payloads, ())
    entries = [
        BundledKernel(
            name=name,
            schema=kernel.spec.schema,
            digest=kernel.spec.source.digest,
            language=kernel.spec.language,
            backward=kernel.spec.backward,
            vmap=kernel.spec.vmap,
            source=f"{os.path.basename(kernel.spec.source.file)}:{kernel.spec.source.line}",
            payload=f"kernels/{i}.pickle",
            sha256=hashlib.sha256(payload).hexdigest(),
        )
        for i, (name, (kernel, payload)) in enumerate(payloads.items())
    ]
    manifest = {
        "kind": KIND,
        "format": FORMAT,
        "tpu_kernels": __version__,
        "python": _python(),
        "jax": jax_version() or "",
        "torch": torch.__version__,
        "kernels": [dataclasses.asdict(entry) for entry in entries],
    }
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        _write(archive, _MANIFEST, json.dumps(manifest, indent=1).encode())
        for entry in entries:
            _write(archive, entry.payload, payloads[entry.name][1])
    content = stream.getvalue()
    _write_atomically(Path(path), content)
    return hashlib.sha256(content).hexdigest()


def _add(
    kernel: Any, payloads: dict[str, tuple[Kernel, bytes]], callers: tuple[Kernel, ...]
) -> None:
    """Pickle a kernel and, before it, the kernels that it calls."""
    if not isinstance(kernel, Kernel):
        raise ArgumentError(f"save_bundle: expected kernels, got {type(kernel).__name__}")
    if kernel.name in payloads or kernel in callers:
        return
    if naming.lookup(kernel.name) is not kernel:
        raise ArgumentError(
            f"save_bundle: kernel {kernel.name!r} was replaced by a later definition",
            where=str(kernel.spec.source),
        )
    payload, called = _dumps(kernel)
    for other in called:
        _add(other, payloads, (*callers, kernel))
    payloads[kernel.name] = kernel, payload


def _dumps(kernel: Kernel) -> tuple[bytes, list[Kernel]]:
    """A kernel as bytes, and the kernels that it refers to."""
    import cloudpickle

    called: list[Kernel] = []

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, Kernel):
                if not _is_own(obj.spec.source.module):
                    called.append(obj)
                    return registered_kernel, (obj.name,)
                return NotImplemented  # shipped with this package: found by its module
            if isinstance(obj, CodeType) and obj.co_filename != _NAMELESS:
                # cloudpickle drops the file names of code, which error messages need.
                return named_code, (obj.replace(co_filename=_NAMELESS), obj.co_filename)
            return super().reducer_override(obj)

    stream = io.BytesIO()
    spec = dataclasses.replace(kernel.spec, cache_dir=None)  # a folder of this machine
    content = {"class": type(kernel), "spec": spec, "customised": kernel.customised}
    with _by_value(kernel.spec.source.module):
        try:
            Pickler(stream).dump(content)
        except Exception as error:  # pickling runs `__reduce__` of arbitrary objects
            reason = str(error).splitlines()[0] if str(error) else ""
            raise BundleError(
                f"kernel {kernel.name!r} cannot be bundled: {type(error).__name__}: {reason}",
                where=str(kernel.spec.source),
                hint="the kernel, its reference or its backward refer to something that cannot be"
                " pickled; pass it as an argument, or make it inside the function",
            ) from error
    return stream.getvalue(), called


@contextlib.contextmanager
def _by_value(kernel_module: str) -> Iterator[None]:
    """A scope in which the code of a kernel's package and of uninstalled modules is pickled
    whole."""
    import cloudpickle

    top = kernel_module.partition(".")[0]
    with _lock, contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if _travels(name, module, top):
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
        yield


def _travels(name: str, module: ModuleType, top: str) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or name != getattr(module, "__name__", None):
        return False
    if name == "__main__" or _is_own(name):  # `__main__` travels by value anyway
        return False
    if name.partition(".")[0] == top:
        return True
    return locations.is_authors(file) and not locations.is_installed(file)


def _is_own(module: str) -> bool:
    return module.partition(".")[0] == _OWN


def registered_kernel(name: str) -> Kernel:
    """Find the kernel that another one calls; called while unpickling.

    Args:
        name: ``"namespace::op"``.

    Raises:
        KernelError: It is not registered in this process.
    """
    kernel = naming.lookup(name)
    if kernel is None:
        raise KernelError(f"kernel {name!r} is not registered in this process")
    return kernel


def _write(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    member = zipfile.ZipInfo(name, _EPOCH)
    member.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(member, content)


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


# -------------------------------------------------------------------------------------- loading
def load(
    path: str | os.PathLike[str], *, digest: str | None = None, replace: bool = False
) -> dict[str, Kernel]:
    """Register the kernels of a bundle, so that exported programs that use them can be loaded.

    This runs code from the file. Load only files that you trust; with ``digest`` the file is
    compared before anything in it is used.

    Args:
        path: A file that `save_bundle` wrote.
        digest: The SHA-256 digest that `save_bundle` returned.
        replace: Replace kernels of the same names that this process defines differently.

    Returns:
        The kernels by name. One that this process already has, with the same source, is that one.

    Raises:
        BundleError: The file is no bundle, is damaged, has another digest, or was written by
            versions that do not fit these.
        NameClashError: This process has another kernel of a name, and ``replace`` is False.
        FileNotFoundError: There is no such file.
    """
    file = Path(path)
    content = file.read_bytes()
    if digest is not None and not secrets.compare_digest(
        hashlib.sha256(content).hexdigest(), digest.lower()
    ):
        raise BundleError(
            f"bundle {file.name!r} is not the one with digest {digest[:16]}…",
            hint="it was changed or replaced since save_bundle returned that digest",
        )
    manifest, payloads = _read(content, file.name)
    _check_versions(manifest, file.name)
    for entry in manifest.kernels:
        if hashlib.sha256(payloads[entry.payload]).hexdigest() != entry.sha256:
            raise _damaged(file.name, f"the content of kernel {entry.name!r} does not fit its hash")
        _check_name(entry, file.name, replace=replace)
    return {
        entry.name: _restore(entry, payloads[entry.payload], file.name, replace=replace)
        for entry in manifest.kernels
    }


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read what a bundle contains without running anything of it.

    Args:
        path: A file that `save_bundle` wrote.

    Returns:
        Versions, and name, schema and digest of each kernel.

    Raises:
        BundleError: The file is no bundle, or is damaged.
    """
    return _read(Path(path).read_bytes(), Path(path).name)[0]


def _read(content: bytes, file: str) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest and the payloads, checked as far as possible without unpickling."""
    if not content:
        raise _damaged(file, "it is empty")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise _damaged(file, str(error)) from error
    except Exception as error:  # zlib raises an error class of its own
        raise _damaged(file, f"{type(error).__name__}: {error}") from error
    if _MANIFEST not in members:
        raise BundleError(f"{file!r} is a zip archive, but no bundle: it has no {_MANIFEST}")
    try:
        raw = json.loads(members[_MANIFEST])
        if raw.get("kind") != KIND:
            raise BundleError(
                f"{file!r} is no bundle of tpu_kernels: its kind is {raw.get('kind')!r}"
            )
        if raw["format"] != FORMAT:
            raise BundleError(
                f"bundle {file!r} has format {raw['format']}, this version reads format {FORMAT}",
                hint=f"it was written by tpu_kernels {raw.get('tpu_kernels')}, this is "
                f"{__version__}",
            )
        kernels = tuple(BundledKernel(**entry) for entry in raw["kernels"])
        versions = {name: str(raw[name]) for name in ("tpu_kernels", "python", "jax", "torch")}
        payloads = {entry.payload: members[entry.payload] for entry in kernels}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(file, f"its manifest: {type(error).__name__}: {error}") from error
    return Manifest(**versions, kernels=kernels), payloads


def _damaged(file: str, reason: str) -> BundleError:
    return BundleError(
        f"{file!r} is not a bundle, or is damaged: {reason}",
        hint="bundles are written by tpu_kernels.save_bundle; copy or write the file again",
    )


def _check_versions(manifest: Manifest, file: str) -> None:
    def series(version: str) -> Sequence[str]:
        return version.split(".")[:2]

    for what, theirs, ours in (
        ("Python", manifest.python, _python()),
        (_OWN, manifest.tpu_kernels, __version__),
    ):
        if series(theirs) != series(ours):
            raise BundleError(
                f"bundle {file!r} was written by {what} {theirs}, and this is {what} {ours}",
                hint="write it again with this version: it holds code, which is bound to versions",
            )


def _check_name(entry: BundledKernel, file: str, *, replace: bool) -> None:
    known = naming.lookup(entry.name)
    if known is not None and known.spec.source.digest != entry.digest and not replace:
        raise NameClashError(
            f"kernel {entry.name!r} of bundle {file!r} differs from the one of this process",
            where=str(known.spec.source),
            hint="pass replace=True to use the bundle's",
        )


def _restore(entry: BundledKernel, payload: bytes, file: str, *, replace: bool) -> Kernel:
    known = naming.lookup(entry.name)
    if known is not None and known.spec.source.digest == entry.digest:
        return known
    try:
        content = pickle.loads(payload)
        kind, spec = content["class"], content["spec"]
        customised = content["customised"]
    except Exception as error:  # unpickling runs arbitrary code
        raise BundleError(
            f"kernel {entry.name!r} of bundle {file!r} cannot be restored here:"
            f" {type(error).__name__}: {error}",
            hint="a library that it uses is missing or has another version",
        ) from error
    if (spec.name, spec.source.digest) != (entry.name, entry.digest):
        raise _damaged(file, f"its manifest says {entry.name!r}, the content is {spec.name!r}")
    kernel = register(spec, replace=replace, kind=kind)
    for method, args, kwargs in customised:
        getattr(kernel, method)(*args, **kwargs)
    return kernel
