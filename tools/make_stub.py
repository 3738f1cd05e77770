"""Writes the type stub of the installed `kvzc._core`, formatted: `make_stub.py <file>`."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


# The exceptions call themselves kvzc.X, where people find them; the stub has to define them.
GENERATE = """
import sys
import kvzc._core
from pybind11_stubgen import main
for value in vars(kvzc._core).values():
    if isinstance(value, type) and issubclass(value, Exception):
        value.__module__ = "kvzc._core"
main(sys.argv[1:])
"""


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True)


def main(target: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run("-c", GENERATE, "kvzc._core", "--output-dir", folder, "--exit-code")
        stub = Path(folder, "kvzc", "_core.pyi")
        # pybind11 names the class without what it is generic in, which mypy --strict wants.
        stub.write_text(stub.read_text().replace("os.PathLike |", "os.PathLike[str] |"))
        run("-m", "ruff", "format", "--quiet", "--config", str(ROOT / "pyproject.toml"), str(stub))
        shutil.copyfile(stub, target)


if __name__ == "__main__":
    main(sys.argv[1])
