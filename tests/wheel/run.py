"""Builds the wheel with each CPython, installs it in a clean environment and tries it there.

`run.py` takes every version that kvzc supports and skips what is not found here; `run.py 3.12 ...`
takes just these, and one that is missing is a failure. Only the standard library is needed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VERSIONS = ["3.10", "3.11", "3.12", "3.13"]
# Until the suite has passed on one of these, each must be refused.
FREE_THREADED = ["3.13t", "3.14t"]
BUILD_LIMIT_S = 1200
SMOKE_LIMIT_S = 120

# An interpreter that cannot make environments, or compile against itself, is none for this purpose.
PROBE = """
import ensurepip, os, sys, sysconfig
header = os.path.join(sysconfig.get_path("include"), "Python.h")
assert sys.implementation.name == "cpython" and os.path.exists(header), header
flag = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
print("%d.%d%s" % (*sys.version_info[:2], flag))
"""


class Failed(Exception):
    """A step went wrong; the text says what."""


def run(*command: str, folder: str, limit_s: float) -> str:
    # Nothing of this shell's Python may reach the clean environment.
    ours = ("PYTHON", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{' '.join(command)}\nhas not ended within {limit_s:g} s") from error
    if done.returncode != 0:
        raise Failed(f"{' '.join(command)}\n{done.stdout}exit status {done.returncode}")
    return done.stdout


def candidates(version: str) -> Iterator[Path]:
    for folder in os.get_exec_path():
        yield Path(folder, f"python{version}")
    # pyenv's shims are on PATH, but answer only for the versions that are switched on.
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    number = version.rstrip("t")
    for home in sorted(pyenv.glob(f"{number}.*"), reverse=True):
        yield home / "bin" / f"python{version}"


def find(version: str) -> Path | None:
    for path in candidates(version):
        if not os.access(path, os.X_OK):
            continue
        probe = subprocess.run([path, "-c", PROBE], capture_output=True, text=True, timeout=60)
        if probe.returncode == 0 and probe.stdout.strip() == version:
            return path
    return None


def build(python: Path, folder: str) -> Path:
    """Builds the wheel as a user's pip does: in an environment of its own."""
    run(str(python), "-m", "venv", "builder", folder=folder, limit_s=120)
    run(
        *("builder/bin/python", "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"),
        *("--no-deps", "--wheel-dir", "dist", str(ROOT)),
        # Away from what `make` has built, which an environment of another path would spoil.
        f"--config-settings=build-dir={folder}/build",
        "--config-settings=cmake.define.KVZC_WERROR=ON",
        folder=folder,
        limit_s=BUILD_LIMIT_S,
    )
    (wheel,) = Path(folder, "dist").iterdir()
    return wheel


def check_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    strange = [name for name in names if not name.startswith(("kvzc/", "kvzc-"))]
    if strange:
        raise Failed(f"{wheel.name} would put files beside the package: {strange}")
    if sum(name.endswith(".so") for name in names) != 1:
        raise Failed(f"{wheel.name} has not just one library: {names}")


def try_wheel(python: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kvzc-wheel-") as folder:
        wheel = build(python, folder)
        check_contents(wheel)
        run(str(python), "-m", "venv", "clean", folder=folder, limit_s=120)
        pip = ("clean/bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
        run(*pip, str(wheel), folder=folder, limit_s=300)
        # A copy, so that nothing of the tree is beside it.
        shutil.copy(HERE / "smoke.py", folder)
        run("clean/bin/python", "smoke.py", str(ROOT), folder=folder, limit_s=SMOKE_LIMIT_S)


def try_refusal(python: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kvzc-wheel-") as folder:
        try:
            build(python, folder)
        except Failed as refused:
            if "free-threaded" not in str(refused):
                raise
        else:
            raise Failed("a wheel was built for a free-threaded interpreter")


def main(asked: list[str]) -> int:
    count = {"passed": 0, "failed": 0, "skipped": 0}
    for version in asked or VERSIONS + FREE_THREADED:
        begin = time.monotonic()
        python = find(version)
        remark = ""
        if python is not None:
            verdict = "passed"
            try:
                (try_refusal if version.endswith("t") else try_wheel)(python)
            except Failed as error:
                verdict, remark = "failed", f"\n{error}"
        else:
            verdict = "failed" if asked else "skipped"
            remark = f": no python{version} with venv and its headers on PATH or in pyenv"
        count[verdict] += 1
        took = f"{time.monotonic() - begin:.0f} s"
        print(f"test-wheel: Python {version}: {verdict.upper()} ({took}){remark}", flush=True)
    if count["passed"] + count["failed"] == 0:
        count["failed"] += 1
        print("test-wheel: no interpreter was found, so nothing was tried")
    print(", ".join(f"{number} {verdict}" for verdict, number in count.items()))
    return 1 if count["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
