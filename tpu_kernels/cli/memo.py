"""Answers of earlier runs: what a command said is said again while nothing that it read changed.

Importing torch and JAX takes longer than everything else that a repeated `check` does, so the
decision is made without them, as a build tool makes it: the answer is kept together with the
content of every file that it came from. Those are the modules of the author's and of this package,
whatever else was opened for reading, and the folder of tuned configurations; the words of the
command, versions, environment and working folder are in the name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tpu_kernels.cli.output import Output
from tpu_kernels.config import settings

FORMAT = 1
_PACKAGES = ("torch", "jax", "jaxlib", "libtpu", "numpy", "helion", "tpu_kernels")
_ENVIRONMENT = ("TPU_KERNELS_", "JAX_", "XLA_", "LIBTPU_", "PYTHONPATH")
_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/")

_opened: set[str] | None = None  # while an answer is recorded
_hooked = False


class Recorder(Output):
    """Passes on what a command prints, and keeps it.

    Args:
        output: Where it goes.
    """

    def __init__(self, output: Output) -> None:
        super().__init__(json_wanted=output.json_wanted)
        self.said: list[list[Any]] = []

    def document(self, value: Mapping[str, Any]) -> None:
        """Print and keep a document."""
        self.said.append(["document", dict(value)])
        super().document(value)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print and keep a table."""
        cells = [[None if cell is None else str(cell) for cell in row] for row in rows]
        self.said.append(["table", title, list(columns), cells])
        super().table(title, columns, cells)

    def line(self, text: str = "") -> None:
        """Print and keep a line."""
        self.said.append(["line", text])
        super().line(text)


class Memo:
    """The answer to one command.

    Args:
        command: Name of the command.
        words: What it was asked: names and values that JSON takes.
    """

    def __init__(self, command: str, words: Mapping[str, Any]) -> None:
        environment = {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_ENVIRONMENT) and name != "TPU_KERNELS_CACHE_DIR"
        }
        parts = (
            *(FORMAT, command, json.dumps(words, sort_keys=True, default=str)),
            *(os.getcwd(), sys.version, environment),
            {name: _version(name) for name in _PACKAGES},
        )
        name = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
        self._path = settings().cache_dir / "answers" / name[:2] / f"{name}.json"

    def repeat(self, output: Output) -> bool:
        """Say again what was said, if it still holds.

        Args:
            output: Where to say it.

        Returns:
            Whether there was such an answer.
        """
        try:
            entry = json.loads(self._path.read_text(encoding="utf-8"))
            said, files, when = entry["said"], entry["files"], entry["when"]
            holds = entry["own"] == _own_digest() and entry["tuned"] == _tuned_digest()
            if not holds or any(_digest(file) != digest for file, digest in files.items()):
                return False
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False  # none, or a damaged one, which the next answer replaces
        for kind, *arguments in said:
            if kind == "document":
                output.document({**arguments[0], "answered": when})
            else:
                getattr(output, kind)(*arguments)
        output.note(f"nothing has changed since {when}; --no-cache asks again")
        return True

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Note every file that is opened for reading in this scope."""
        global _opened, _hooked
        if not _hooked:
            sys.addaudithook(_note_opening)  # cannot be removed again; it does nothing outside
            _hooked = True
        _opened = set()
        try:
            yield
        finally:
            self._files, _opened = _opened, None

    def keep(self, recorder: Recorder) -> None:
        """Keep an answer for the next time, with the files that were read since `watch`.

        Args:
            recorder: What was said.
        """
        files = {file: _digest(file) for file in _relevant({*self._files, *_module_files()})}
        entry = {
            "own": _own_digest(),
            "tuned": _tuned_digest(),
            "files": {file: digest for file, digest in files.items() if digest is not None},
            "when": datetime.now().astimezone().isoformat(" ", "minutes"),
            "said": recorder.said,
        }
        # An answer that cannot be kept is found again; a full disk is no reason to fail.
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=".new-")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(entry, file, default=str)
            os.replace(temporary, self._path)


def _note_opening(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is None or event != "open":
        return
    path, _, flags = arguments
    reading = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR) == 0
    if reading and isinstance(path, (str, os.PathLike)):
        _opened.add(os.path.abspath(path))


def _module_files() -> set[str]:
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return {os.path.abspath(file) for file in files if isinstance(file, str)}


def _relevant(files: Iterable[str]) -> list[str]:
    """The files that no version stands for: not a library's, the system's, or a cache's."""
    paths = sysconfig.get_paths()
    skipped = (
        *(str(Path(paths[name])) + os.sep for name in ("stdlib", "purelib", "platlib")),
        *(str(root) + os.sep for root in (*_own_roots(), settings().cache_dir.absolute())),
        *(str(Path(tempfile.gettempdir()) / "tpu_kernels-worker-"), *_SYSTEM),
    )
    return sorted(
        file
        for file in files
        if not file.startswith(skipped)
        and not file.endswith(".pyc")
        and "-packages" + os.sep not in file
    )


def _digest(file: str) -> str | None:
    """Hash of a file's content, None for what is no file."""
    try:
        return hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return None


def _own_roots() -> list[Path]:
    """This package's folders; in a checkout, layers lie beside each other."""
    roots: list[Path] = []
    for name in ("tpu_kernels", "tpu_kernels.dsl", "tpu_kernels.registry"):
        spec = find_spec(name)
        folders = spec.submodule_search_locations if spec is not None else None
        roots += [Path(folder) for folder in folders or ()]
    return roots


def _own_digest() -> str:
    """Hash of this package's content: a worker process reads more of it than this one does."""
    hasher = hashlib.blake2b(digest_size=16)
    for root in _own_roots():
        for file in sorted(root.rglob("*")):
            if file.suffix in (".py", ".json", ".toml", ".gz"):
                hasher.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return hasher.hexdigest()


def _tuned_digest() -> str:
    """Hash of which tuned configurations there are: a new one may decide the next answer."""
    folder = settings().cache_dir / "tuning"
    found = []
    for file in sorted(folder.rglob("*")) if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            status = file.stat()
            found.append((str(file.relative_to(folder)), status.st_size, status.st_mtime_ns))
    return hashlib.blake2b(repr(found).encode(), digest_size=16).hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
