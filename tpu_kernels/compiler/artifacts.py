"""The files that libtpu leaves behind a compilation, and the figures in them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
RUNTIME = (
    "<late-initialization>",
    "<late-finalization>",
    "late-initialization",
    "late-finalization",
    "<top-inlining-caller>",
)
_STAMP = re.compile(r"^\d+-")
_WINDOW = re.compile(
    r"(input|output) window allocation for operator \w+ (\d+)\. The window shape is (\w+\[[\d,]*\])"
)
_BUFFERING = re.compile(r"has (\d+) buffering levels")
# A result's type is one word, or a tuple in parentheses with blanks in it.
_HLO_LINE = re.compile(
    r"^\s+(?:ROOT )?%(\S+) = (?:\(.*?\)|\S+) ([a-z][a-z0-9-]*)\((.*)$", re.MULTILINE
)
_HLO_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_HLO_OP_NAME = re.compile(r'metadata=\{[^}]*?op_name="([^"]*)"')


@dataclass(frozen=True)
class Allocation:
    """A part of VMEM that an HLO uses.

    Attributes:
        role: ``"input"``, ``"output"``, ``"scratch"``, ``"spill"`` or ``"other"``.
        name: What it is for, such as ``"input 0"``.
        shape: Of one buffer, such as ``"bf16[512,1024]"``; empty if it is not known.
        buffers: How many of that shape.
        bytes: Size of all of them together, padding included.
    """

    role: str
    name: str
    shape: str
    buffers: int
    bytes: int


@dataclass(frozen=True)
class HloFacts:
    """What an HLO instruction is.

    Attributes:
        opcode: Such as ``"fusion"``.
        target: Target of a custom call; ``"tpu_custom_call"`` is a Pallas kernel.
        op_name: Where it comes from in the traced function, such as ``"jit(f)/tanh"``.
    """

    opcode: str
    target: str
    op_name: str


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
        if match and match[1] not in ("TLP", *RUNTIME):
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
    """Read the totals of libtpu's VMEM report.

    Args:
        html: Text of ``...-vmem_report.html``, which holds its data as JSON.

    Returns:
        Bytes of VMEM by HLO name; empty if the page is not of the form known.
    """
    return {name: total for name, (total, _) in vmem_allocations(html).items()}


def vmem_allocations(html: str) -> dict[str, tuple[int, tuple[Allocation, ...]]]:
    """Read libtpu's VMEM report.

    Args:
        html: Text of ``...-vmem_report.html``, which holds its data as JSON.

    Returns:
        Total bytes of VMEM and what they are for, by HLO name; empty if the page is not of the form
        known.
    """
    start = _VMEM_DATA.search(html)
    if start is None:
        return {}
    try:
        data = json.JSONDecoder().raw_decode(html[start.end() :])[0]
        return {
            name: (int(row["total_size"]), tuple(_allocations(row["blocks"])))
            for name, row in data["hlo_breakdowns"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _allocations(blocks: Iterable[Any]) -> Iterator[Allocation]:
    for block in blocks:
        listed = block["allocations"]
        for row in listed:
            yield _allocation(str(row["tag"]), int(row["size"]), row.get("shape") or "")
        rest = int(block["block_size"]) - sum(int(row["size"]) for row in listed)
        if rest > 0:
            name = str(block["block_type"]).replace("_", " ").lower()
            yield Allocation("other", name, "", 1, rest)


def _allocation(tag: str, size: int, shape: str) -> Allocation:
    window = _WINDOW.match(tag)
    if window is not None:
        found = _BUFFERING.search(tag)
        buffers = int(found[1]) if found else 1
        return Allocation(window[1], f"{window[1]} {window[2]}", window[3], buffers, size)
    if tag == "SPILL":
        return Allocation("spill", "register spills", "", 1, size)
    if tag == "scratch operand":
        return Allocation("scratch", "scratch", shape, 1, size)
    return Allocation("other", tag.partition(".")[0][:60], "", 1, size)


def hlo_facts(text: str) -> dict[str, HloFacts]:
    """Read what the compiler's final HLO says of each instruction.

    Args:
        text: Text of ``...TLP-hlo.txt``.

    Returns:
        Facts by name of the instruction.

    Example:
        >>> hlo_facts('  %f.1 = f32[8]{0} fusion(%x), metadata={op_name="jit(g)/tanh" id=1}')
        {'f.1': HloFacts(opcode='fusion', target='', op_name='jit(g)/tanh')}
    """
    found = {}
    for name, opcode, rest in _HLO_LINE.findall(text):
        target, op_name = _HLO_TARGET.search(rest), _HLO_OP_NAME.search(rest)
        found[name] = HloFacts(opcode, target[1] if target else "", op_name[1] if op_name else "")
    return found
