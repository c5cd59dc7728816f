"""The Python blocks of the documentation run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.sources import ROOT

DOCUMENTS = [
    path.relative_to(ROOT)
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
]
_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?P<target>[^)#]+)(#[^)]*)?\)")


def python_blocks(text: str) -> str:
    """All blocks as one program, on the lines they have in the document: tracebacks name them."""
    program = [""] * text.count("\n")
    for block in _BLOCK.finditer(text):
        first = text.count("\n", 0, block.start("code"))
        lines = block["code"].splitlines()
        program[first : first + len(lines)] = lines
    return "\n".join(program)


@pytest.mark.libtpu  # the documentation compiles and tunes
@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_the_python_blocks_of(document: Path, tmp_path: Path) -> None:
    program = python_blocks((ROOT / document).read_text())
    if not program.strip():
        pytest.skip("no Python block")
    # Python puts the script's folder first: a script helion.py would be what `import helion` finds.
    script = tmp_path / f"blocks_of_{document.stem.lower()}.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env={**os.environ, "COLUMNS": "100"},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{document} (line numbers are the document's)\n{done.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_the_links_to_files_of(document: Path) -> None:
    text = (ROOT / document).read_text()
    targets = [m["target"] for m in _LINK.finditer(text) if "://" not in m["target"]]
    missing = [t for t in targets if not (ROOT / document.parent / t).exists()]
    assert missing == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = [str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")]
    assert [page for page in pages if page != "index.md" and f"({page})" not in index] == []


def test_blocks_keep_their_line_numbers() -> None:
    text = "# Title\n\n```python\na = 1\n```\n\n```sh\nmake\n```\n\n```python\nb = 2\n```\n"
    lines = python_blocks(text).splitlines()
    assert {number: line for number, line in enumerate(lines, 1) if line} == {
        4: "a = 1",
        12: "b = 2",
    }
