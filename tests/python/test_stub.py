"""The stub in the tree is the one that the built module gives."""

import difflib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_stub_matches_the_module(tmp_path: Path) -> None:
    fresh = tmp_path / "_core.pyi"
    made = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "make_stub.py"), str(fresh)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert made.returncode == 0, made.stdout + made.stderr

    kept = ROOT / "python" / "kvzc" / "_core.pyi"
    before = kept.read_text().splitlines() if kept.exists() else []
    after = fresh.read_text().splitlines()
    difference = difflib.unified_diff(before, after, str(kept), "from the module", lineterm="")
    if before != after:
        pytest.fail("_core.pyi is out of date; run `make stub`\n" + "\n".join(difference))
