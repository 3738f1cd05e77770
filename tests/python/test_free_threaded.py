"""A free-threaded CPython is refused, when kvzc is built and when it is imported, with a remedy.

There is no such interpreter to try here (tests/wheel/run.py does where there is one): these tests
make the ordinary one look like it.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11

ROOT = Path(__file__).resolve().parents[2]


def refused(*command: str, **options: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=options.pop("folder", None),
        env={**os.environ, **options},
    )
    assert done.returncode != 0, done.stdout
    text = " ".join((done.stdout + done.stderr).split())
    assert "free-threaded" in text and "ordinary" in text, text
    return text


def test_import_is_refused(tmp_path: Path) -> None:
    code = "import sys; sys.abiflags += 't'; import kvzc"
    text = refused(sys.executable, "-c", code, folder=str(tmp_path))
    assert "ImportError: this is a free-threaded Python" in text


def test_bindings_do_not_compile() -> None:
    compiler = os.environ.get("CXX", "c++")
    flags = ["-std=c++20", "-fsyntax-only", "-I", sysconfig.get_path("include"), "-x", "c++"]
    header = str(ROOT / "cpp" / "bindings" / "bindings.h")
    refused(compiler, *flags, "-DPy_GIL_DISABLED=1", header)


def test_cmake_refuses_it(tmp_path: Path) -> None:
    # Read by every interpreter that CMake starts.
    (tmp_path / "sitecustomize.py").write_text(
        "import sysconfig\nsysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1\n"
    )
    text = refused(
        "cmake",
        *("-S", str(ROOT), "-B", str(tmp_path / "build"), "-DKVZC_PYTHON=ON"),
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        PYTHONPATH=str(tmp_path),
    )
    assert "is a free-threaded CPython" in text
