"""Each public header stands alone, and no source knows the machine that it was written on."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "cpp" / "include"
HEADERS = sorted(path.relative_to(INCLUDE).as_posix() for path in INCLUDE.rglob("*.h"))


@pytest.mark.parametrize("header", HEADERS)
def test_public_header_compiles_alone(header: str) -> None:
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-I", str(INCLUDE)]
    # Twice, so that a missing include guard shows as well.
    done = subprocess.run(
        [os.environ.get("CXX", "c++"), *flags, "-x", "c++", "-"],
        input=f'#include "{header}"\n#include "{header}"\n',
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


MACHINE_PATH = re.compile(r"(?<![\w.~])/(work|root)/")
FOLDERS = [".ci", "bench", "cpp", "docs", "python", "tests", "tools"]


def test_no_source_names_a_path_of_one_machine() -> None:
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    for folder in FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    found = []
    for path in files:
        if "__pycache__" in path.parts:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []
