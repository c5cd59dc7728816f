"""Recording a workload: in a block of a program, or in every process of one."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tpu_kernels.errors import ArgumentError, CacheUnwritable
from tpu_kernels.registry import config_table, observing
from tpu_kernels.tuning.workload import Workload, describe

_SUFFIX = ".workload.json"


@contextlib.contextmanager
def record(path: str | os.PathLike[str] | None = None) -> Iterator[Workload]:
    """Record which kernels run with which shapes, dtypes and static values.

    Kernels called eagerly, in backward, and in graphs that are compiled inside the block are seen,
    in all threads. A graph that was compiled before is not: its programs are there already.

    Args:
        path: File to write the workload to at the end, also when the block raises.

    Returns:
        A context manager that gives the `Workload`, which grows while the block runs.

    Example:
        >>> import jax, torch
        >>> import tpu_kernels as tk
        >>> @tk.tpu_kernel("doc::recorded")
        ... def recorded(x: jax.Array, power: int = 2, *, block: int = 8) -> jax.Array:
        ...     return x**power
        >>> with record() as workload:
        ...     for x in torch.ones(4, 2), torch.zeros(4, 2):
        ...         _ = recorded(x)
        ...     _ = recorded(torch.ones(3), 3)
        >>> for call in workload:
        ...     print(call)
        doc::recorded x=float32[4,2] power=2 block=8
        doc::recorded x=float32[3] power=3 block=8
    """
    workload = Workload()
    lock = threading.Lock()

    def observe(spec: Any, call: Any, statics: Mapping[str, Any]) -> None:
        described = describe(spec, call, statics)
        if described is not None:
            with lock:
                workload.add(described)

    observing.add_observer(observe)
    # Programs that exist are made anew, and so are seen.
    config_table.bump()
    try:
        yield workload
    finally:
        observing.remove_observer(observe)
        if path is not None:
            workload.save(path)


class _Process:
    """The recording of a whole process: its file is rewritten whenever a new call is met, so that a
    killed process loses nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.Lock()
        self.workload = Workload()
        self.owner = 0
        self.file = folder

    def observe(self, spec: Any, call: Any, statics: Mapping[str, Any]) -> None:
        """Take in a call."""
        described = describe(spec, call, statics)
        if described is None:
            return
        with self.lock:
            if self.owner != os.getpid():  # a fork writes a file of its own
                self.owner = os.getpid()
                self.file = self.folder / f"{self.owner}-{secrets.token_hex(4)}{_SUFFIX}"
            if not self.workload.add(described):
                return
            try:
                self.workload.save(self.file)
            except OSError as error:
                warnings.warn(
                    f"the recorded workload cannot be written to {self.folder}: {error}",
                    CacheUnwritable,
                    stacklevel=2,
                )


_process: _Process | None = None


def record_process(folder: Path) -> None:
    """Record this process from now on into a file of a folder; calling it again changes nothing."""
    global _process
    if _process is None:
        _process = _Process(folder)
        observing.add_observer(_process.observe)


def collect(folder: Path) -> Workload:
    """Merge what the processes of a program wrote into a folder.

    Warns:
        UserWarning: A file is damaged; the others count.
    """
    merged = Workload()
    for file in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            for call in Workload.load(file):
                merged.add(call)
        except ArgumentError as error:
            warnings.warn(str(error), stacklevel=2)
    return merged
