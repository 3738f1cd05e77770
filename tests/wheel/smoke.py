"""What an installed wheel must do, with nothing but its own requirements: `python smoke.py <tree>`.

The tree is where the package must not come from. Two processes, NumPy only.
"""

import importlib.util
import json
import multiprocessing
import subprocess
import sys
import sysconfig
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kvzc
import numpy as np

LIMIT_S = 30.0
BLOCKS = [5, 1, 6]


def run(*command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == code, (command, done)
    return done


def answer(pipe: Connection) -> Any:
    assert pipe.poll(LIMIT_S), "the other process does not answer"
    return pipe.recv()


def is_within(path: str, folder: str) -> bool:
    return Path(path).resolve().is_relative_to(Path(folder).resolve())


def check_package(tree: str) -> None:
    purelib = sysconfig.get_path("platlib")
    for module in (kvzc.__file__, kvzc._core.__file__):
        assert is_within(module, purelib), f"{module} is not in {purelib}"
        assert not is_within(module, tree), f"{module} comes from the tree"
    package = Path(kvzc.__file__).parent
    assert (package / "py.typed").is_file() and (package / "_core.pyi").is_file()
    assert importlib.util.find_spec("torch") is None, "torch is here: the environment is not clean"


def check_commands() -> None:
    command = str(Path(sysconfig.get_path("scripts"), "kvzc"))
    assert "shm" in run(command, "info").stdout
    info = json.loads(run(sys.executable, "-m", "kvzc", "info", "--json").stdout)
    assert info["version"] == kvzc.__version__
    assert {each["name"]: each["available"] for each in info["transports"]}["shm"] is True
    assert "kvzc[torch]" in run(sys.executable, "-m", "kvzc", "demo", code=2).stderr


def prefill(pipe: Connection) -> None:
    """The other process: puts, gets, and finds that a revoked grant holds no more."""
    with kvzc.Engine(default_timeout=LIMIT_S) as engine:
        handle = kvzc.RemoteHandle.from_text(answer(pipe))
        source = np.arange(handle.nbytes // 4, dtype="float32").reshape(handle.shape)
        transfer = engine.put(source, handle, notify=b"layer 1")
        transfer.wait()
        assert transfer.done and transfer.transport == "shm"
        pipe.send("put")

        assert answer(pipe) == "get"
        target = np.zeros(handle.shape, "float32")
        engine.get(target, handle, notify=b"read").wait()
        np.testing.assert_array_equal(target, 2 * source)

        assert answer(pipe) == "revoked"
        try:
            engine.put(source, handle).wait()
        except kvzc.Revoked as error:
            pipe.send(str(error))
        else:
            pipe.send(None)


def check_two_processes() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    other = context.Process(target=prefill, args=(theirs,), daemon=True)
    other.start()
    theirs.close()
    with kvzc.Engine(default_timeout=LIMIT_S) as engine:
        cache = kvzc.empty((2, 8, 4, 16), "float32")
        region = engine.register(cache)
        grant = region[1, BLOCKS].grant("both")
        pipe.send(grant.handle().to_text())

        arrival = engine.arrivals.wait(b"layer 1")
        assert arrival.error is None
        expected = np.zeros_like(cache)
        expected[1, BLOCKS] = np.arange(3 * 4 * 16, dtype="float32").reshape(3, 4, 16)
        np.testing.assert_array_equal(cache, expected)
        assert answer(pipe) == "put"

        cache *= 2
        pipe.send("get")
        engine.arrivals.wait(b"read")

        grant.revoke()
        pipe.send("revoked")
        before = cache.copy()
        assert answer(pipe), "a put through a revoked grant was taken"
        np.testing.assert_array_equal(cache, before)
    other.join(LIMIT_S)
    assert other.exitcode == 0, other.exitcode


if __name__ == "__main__":
    check_package(sys.argv[1])
    check_commands()
    check_two_processes()
    print("smoke: all is well")
