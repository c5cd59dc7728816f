"""The files that libtpu leaves behind a compilation, and the figures in them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpu_kernels.compiler.lowering import Program

# The smallest dump that has the generated code: 0.8 MB for a matmul, where everything would be 37
# MB.
DUMPED_PASSES = "final_bundles|deduplication-map"

_BUNDLE = re.compile(
    r"^[ \t]*(?:0x[0-9a-f]+|0)[ \t]+(?:[A-Z]{2}[ \t]+)*:[ \t]*[> ]*\{", re.MULTILINE
)
_SPILL = re.compile(r"\bvst\b[^;]*?_spill")
_VMEM_DATA = re.compile(r"DATA\s*=\s*")
# What libtpu adds around a program, under names with and without the brackets that `copy` drops.
_RUNTIME = (
    "<late-initialization>",
    "<late-finalization>",
    "late-initialization",
    "late-finalization",
    "<top-inlining-caller>",
)
_STAMP = re.compile(r"^\d+-")


def libtpu_flags(folder: Path) -> str:
    """Return the flags that make libtpu write its generated code to a folder.

    They can be given only through ``LIBTPU_INIT_ARGS`` before libtpu loads, not for one
    compilation.

    Args:
        folder: Where to write.

    Returns:
        The flags, separated by spaces.
    """
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_pass_label_regex={DUMPED_PASSES}"


def listing(folder: Path) -> set[Path]:
    """Return the files in a folder, none if it does not exist."""
    return set(folder.iterdir()) if folder.is_dir() else set()


def copy(files: Iterable[Path], folder: Path) -> None:
    """Copy dumped files to a folder of the user's, under names without time stamps.

    Args:
        files: Files of one compilation.
        folder: Made if it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(files):
        shutil.copyfile(file, folder / _STAMP.sub("", file.name).replace("<", "").replace(">", ""))


def remove(files: Iterable[Path]) -> None:
    """Remove dumped files that have been read."""
    for file in files:
        file.unlink(missing_ok=True)


def write_program(program: Program, folder: Path) -> None:
    """Write what goes into the compiler as text: StableHLO, and Mosaic for each Pallas kernel.

    Args:
        program: The lowered program.
        folder: Made if it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program.stablehlo.mlir").write_text(program.text, encoding="utf-8")
    for index, kernel in enumerate(program.kernels):
        name = re.sub(r"[^\w.-]", "_", kernel.name) or "kernel"
        (folder / f"{index:02d}-{name}.mosaic.mlir").write_text(kernel.mosaic(), encoding="utf-8")


def bundle_texts(files: Iterable[Path]) -> dict[str, Path]:
    """Select the files with generated code among the dumped ones.

    Args:
        files: Files of one compilation.

    Returns:
        File by HLO name (``"scale.1"``): Pallas kernels and XLA's own fusions and copies alike.
    """
    texts = {}
    for file in sorted(files):
        match = re.fullmatch(r"(?:\d+-)?(.+?)-\d+-final_bundles\.txt", file.name)
        if match and match[1] not in ("TLP", *_RUNTIME):
            texts[match[1]] = file
    return texts


def is_top_level(file: Path) -> bool:
    """Tell whether a dumped file is the listing of the program that calls the kernels.

    Args:
        file: A dumped file.

    Returns:
        Whether it is.

    Example:
        >>> is_top_level(Path("17960-TLP-02-final_bundles.txt"))
        True
    """
    return re.fullmatch(r"(?:\d+-)?TLP-\d+-final_bundles\.txt", file.name) is not None


def figures(files: Iterable[Path]) -> dict[str, Any]:
    """Read the figures of a report off the dumped files.

    Args:
        files: Files of one compilation.

    Returns:
        ``bundles`` and ``spills`` of all generated code together, ``vmem_bytes`` of the largest
        kernel; an entry is absent where the dump does not tell.
    """
    files = list(files)
    found: dict[str, Any] = {}
    texts = [
        file.read_text(encoding="utf-8", errors="replace") for file in bundle_texts(files).values()
    ]
    if texts:
        found["bundles"] = sum(len(_BUNDLE.findall(text)) for text in texts)
        found["spills"] = sum(len(_SPILL.findall(text)) for text in texts)
    for file in files:
        if file.name.endswith("vmem_report.html"):
            sizes = vmem_by_kernel(file.read_text(encoding="utf-8", errors="replace"))
            if sizes:
                found["vmem_bytes"] = max(sizes.values())
    return found


def vmem_by_kernel(html: str) -> dict[str, int]:
    """Read libtpu's VMEM report.

    Args:
        html: Text of ``...-vmem_report.html``, which holds its data as JSON.

    Returns:
        Bytes of VMEM by HLO name; empty if the page is not of the form known.
    """
    start = _VMEM_DATA.search(html)
    if start is None:
        return {}
    try:
        data = json.JSONDecoder().raw_decode(html[start.end() :])[0]
        return {name: int(row["total_size"]) for name, row in data["hlo_breakdowns"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
