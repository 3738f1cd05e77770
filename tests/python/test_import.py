"""`import kvzc` is cheap: it brings neither torch nor NumPy along."""

import subprocess
import sys
from pathlib import Path


def run(code: str, folder: Path) -> str:
    """Runs `code` in a fresh interpreter, away from the tree; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_brings_neither_torch_nor_numpy(tmp_path: Path) -> None:
    loaded = run("import kvzc, sys; print({'torch', 'numpy'} & set(sys.modules))", tmp_path)
    assert loaded == "set()"


def test_import_takes_less_than_100_ms(tmp_path: Path) -> None:
    code = "import time; t = time.perf_counter(); import kvzc; print(time.perf_counter() - t)"
    # The best of seven: the first writes bytecode, and a busy machine only ever adds.
    seconds = min(float(run(code, tmp_path)) for _ in range(7))
    assert seconds < 0.1
