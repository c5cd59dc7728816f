"""`report`: compile kernels for several TPUs and draw what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu_kernels.compiler import CompileReports, Request, Target, compile_all, resolve
from tpu_kernels.compiler.pallas_model import PallasModel, pallas_models
from tpu_kernels.errors import ArgumentError
from tpu_kernels.verify.compiling import Traceable, traceable
from tpu_kernels.verify.pictures.page import Entry, page

TARGETS = ("v5e", "v5p", "v6e", "tpu7x")
"""Targets of a report by default: the generations that the estimates are calibrated for."""


@dataclass(frozen=True)
class Page:
    """A report that was written.

    Attributes:
        path: The HTML page.
        images: The PNG files, none where they were not asked for.
        reports: The compiler's reports by kernel, by target.
    """

    path: Path
    images: tuple[Path, ...]
    reports: Mapping[str, CompileReports]

    @property
    def ok(self) -> bool:
        """Whether every kernel compiles for every target."""
        return all(reports.ok for reports in self.reports.values())

    def __str__(self) -> str:
        good = sum(r.ok for reports in self.reports.values() for r in reports.values())
        total = sum(len(reports) for reports in self.reports.values())
        images = f" and {len(self.images)} images" if self.images else ""
        return f"{self.path}{images}: {good} of {total} compile"


def report(
    kernel: Callable[..., Any] | Mapping[str, tuple[Callable[..., Any], Sequence[Any]]],
    args: Sequence[Any] = (),
    target: str | Target | Sequence[str | Target] = TARGETS,
    *,
    path: str | Path = "report.html",
    png: str | Path | None = None,
    title: str | None = None,
    config: Mapping[str, Any] | None = None,
    timeout_s: float = 600.0,
    cache: bool = True,
    **kwargs: Any,
) -> Page:
    """Compile a kernel for several TPUs and draw it: one HTML page, on request PNG files.

    The page shows the table of targets, a roofline for each chip, the use of the units, vector
    memory, and the pipeline's first and last steps. It loads nothing and has no script.

    Args:
        kernel: A registered kernel or a JAX function; or several, as ``{name: (kernel, args)}``.
        args: Arguments of a single kernel; of tensors and arrays only shape and dtype count.
        target: Chips, with or without a topology.
        path: File to write the page to.
        png: Folder to write the charts to as PNG files; needs matplotlib.
        title: Title of the page; by default the kernel's name.
        config: Tunable parameters of a single kernel.
        timeout_s: Seconds that the compiler may take for one kernel on one target.
        cache: Look results up on disk first, and keep them there.
        **kwargs: Keyword arguments of a single kernel.

    Returns:
        Where it was written, and the reports behind it.

    Raises:
        ConfigError: If a target is unknown.
        ArgumentError: If the arguments do not fit the kernel, or several kernels come with
            arguments that belong to one.
        MissingDependency: If PNG files are asked for and matplotlib is absent.

    Example:
        >>> import tempfile, torch, jax.numpy as jnp
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = report(jnp.tanh, (torch.zeros(8, 128),), "v6e", path=f"{folder}/tanh.html")
        ...     "<!doctype html>" in page.path.read_text()
        True
    """
    if png is not None:
        from tpu_kernels.verify.pictures import plots

        plots.require()
    chosen = [target] if isinstance(target, (str, Target)) else list(target)
    targets = [resolve(each) for each in chosen]
    if not targets:
        raise ArgumentError("no target to report on", hint="name one, such as 'v6e'")
    if isinstance(kernel, Mapping):
        if args or kwargs or config:
            raise ArgumentError(
                "arguments and config belong to one kernel, and there are several",
                hint="give {name: (kernel, args)} alone",
            )
        programs = {n: traceable(fn, tuple(a), None, {}) for n, (fn, a) in kernel.items()}
    else:
        single = traceable(kernel, tuple(args), config, kwargs)
        programs = {single.name: single}
    entries = compiled(programs, targets, timeout_s=timeout_s, cache=cache)
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    names = ", ".join(entry.name for entry in entries)
    place.write_text(page(entries, title or names), encoding="utf-8")
    images: list[Path] = []
    if png is not None:
        for entry in entries:
            images += plots.write(entry, Path(png))
    return Page(place, tuple(images), {entry.name: entry.reports for entry in entries})


def compiled(
    programs: Mapping[str, Traceable],
    targets: Sequence[Target],
    *,
    timeout_s: float = 600.0,
    cache: bool = True,
) -> list[Entry]:
    """Compile programs for targets, all in parallel.

    Args:
        programs: Program by name.
        targets: The targets.
        timeout_s: Seconds that the compiler may take for each.
        cache: Look results up on disk first, and keep them there.

    Returns:
        One entry for each program.
    """
    requests = [
        Request(
            fn=program.function_for(target),
            avals=program.avals,
            target=target,
            name=name,
            where=program.where,
            timeout_s=timeout_s,
            cache=cache,
            concrete=program.concrete,
        )
        for name, program in programs.items()
        for target in targets
    ]
    done = dict(compile_all(requests))
    entries = []
    for row, (name, program) in enumerate(programs.items()):
        first = row * len(targets)
        reports = {each.name: done[first + column] for column, each in enumerate(targets)}
        models = {each.name: _models(program, each) for each in targets}
        words = ", ".join(map(_words, program.avals))
        entries.append(Entry(name, words, CompileReports(reports), models))
    return entries


def _models(program: Traceable, target: Target) -> list[PallasModel]:
    """Demands of the Pallas calls; none where the function cannot be traced for this target."""
    from tpu_kernels.compiler.pallas_grid import trace

    try:
        return pallas_models(trace(program.function_for(target), program.avals, target))
    except Exception:  # the author's code may raise anything, and the compiler's report says what
        return []


def _words(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
