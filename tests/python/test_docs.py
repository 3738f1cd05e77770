"""The examples of docs/ run, in the order in which they stand."""

import re
import subprocess
import sys
from pathlib import Path

import kvzc
import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DOCUMENTS = [
    path for path in sorted((ROOT / "docs").glob("*.md")) if BLOCK.search(path.read_text())
]


def test_there_are_examples() -> None:
    assert ROOT / "docs" / "guide.md" in DOCUMENTS


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_examples_run(document: Path, tmp_path: Path) -> None:
    program = "\n".join(BLOCK.findall(document.read_text()))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_examples_are_typed(document: Path, tmp_path: Path) -> None:
    """A user's program under mypy --strict, against the stub that is installed."""
    program = tmp_path / "example.py"
    program.write_text("\n".join(BLOCK.findall(document.read_text())))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), str(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout


def test_links_lead_somewhere() -> None:
    for document in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
            assert target.startswith("https://") or (document.parent / target).exists(), (
                f"{document.name}: {target}"
            )


def test_what_callers_must_know_stands_where_they_look() -> None:
    """Pitfalls that no error can tell of."""
    for indexing in (kvzc.Region.__getitem__, kvzc.LocalView.__getitem__):
        said = " ".join((indexing.__doc__ or "").split())
        assert re.search(r"Copies nothing.*torch's own indexing would copy", said), said
    said = " ".join((kvzc.share.__doc__ or "").split())
    assert re.search(r"raw pointers and NumPy arrays taken before go stale", said), said
