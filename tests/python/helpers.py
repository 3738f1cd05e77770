"""Other processes for tests: always with a time-out, always reaped."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

LIMIT_S = 60.0  # Nothing in these tests takes this long; what does, hangs.

State = SimpleNamespace

# Processes are forked from one that has all this imported and never had an engine: a spawned one
# takes a second to come up, these 30 ms.
_context = multiprocessing.get_context("forkserver")
_preload = ["hypothesis", "kvzc", "ml_dtypes", "numpy", "pytest"]
# Emulated, importing torch takes a minute.
if "KVZC_SOFTROCE" not in os.environ:
    _preload.append("torch")
_context.set_forkserver_preload(_preload)


class PeerError(AssertionError):
    """A function of the other process raised; the text is its traceback."""


def _serve(pipe: Connection) -> None:
    """Runs in the other process: functions one by one, all with the same state."""
    state = State()
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(state, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


class Peer:
    """A process that runs functions `f(state, *args)` for the test, one at a time.

    Functions and their arguments are pickled, so they are those of a module.
    """

    def __init__(self) -> None:
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Starts a function; take what it returns with result()."""
        self._pipe.send((function, args))

    def result(self, timeout: float = LIMIT_S) -> Any:
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"the other process did not answer within {timeout} s")
        went_well, value = self._pipe.recv()
        if not went_well:
            raise PeerError(value)
        return value

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = LIMIT_S) -> Any:
        self.start(function, *args)
        return self.result(timeout)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._reap(LIMIT_S)

    def _reap(self, timeout: float) -> None:
        # Not join(): that waits for children of the process as well, which inherit its pipes.
        until(lambda: self._process.exitcode is not None, timeout)

    def close(self) -> None:
        """Lets the process end by itself; kills one that does not."""
        self._pipe.close()
        try:
            self._reap(5)
        except AssertionError:
            self.kill()
        self._process.close()


def states(pid: int) -> set[str]:
    """States of a process's threads, as in proc(5)."""
    out = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        path = f"/proc/{pid}/task/{thread}/stat"
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(path) as stat:
            out.add(stat.read().rpartition(")")[2].split()[0])
    return out


def stop(peer: Peer) -> None:
    """Stops a process and returns when all its threads stand."""
    peer.signal(signal.SIGSTOP)
    until(lambda: states(peer.pid) == {"T"})  # The signal takes its time to each of them.


@contextlib.contextmanager
def stopped(peer: Peer) -> Iterator[None]:
    try:
        stop(peer)
        yield
    finally:
        peer.signal(signal.SIGCONT)


@dataclass
class Ended:
    """How a script ended."""

    status: int
    output: str
    errors: str
    exit_s: float  # From its last line of output to its end.


def run_script(code: str, *args: str, signal_at: tuple[str, signal.Signals] | None = None) -> Ended:
    """Runs Python code in a process of its own and waits until it has ended.

    signal_at: a line of output, and the signal that the process gets when it prints that line.
    """
    command = [sys.executable, "-W", "error", "-X", "faulthandler", "-c", code, *args]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    lines = []
    with stopped_after(process, LIMIT_S), process:
        assert process.stdout is not None and process.stderr is not None
        last = time.monotonic()
        for line in process.stdout:
            last = time.monotonic()
            lines.append(line)
            if signal_at is not None and line.strip() == signal_at[0]:
                process.send_signal(signal_at[1])
        status = process.wait(LIMIT_S)
        exit_s = time.monotonic() - last
        return Ended(status, "".join(lines), process.stderr.read(), exit_s)


@contextlib.contextmanager
def stopped_after(process: subprocess.Popen[str], seconds: float) -> Iterator[None]:
    """Kills the process when the block takes longer than this, or raises."""
    import threading

    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    except BaseException:
        process.kill()
        raise
    finally:
        timer.cancel()
        timer.join()


def until(condition: Callable[[], object], timeout: float = 10.0) -> None:
    """Waits until the condition holds; fails when it does not in time."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come to hold in time"
        time.sleep(0.002)


def leftovers() -> set[str]:
    """What of kvzc lies in /dev/shm."""
    return {name for name in os.listdir("/dev/shm") if "kvzc" in name}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    """How many pieces of kvzc's shared memory this process has mapped."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:kvzc" in line for line in maps)


def threads() -> list[str]:
    """Names of this process's native threads that belong to kvzc."""
    out = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{thread}/comm") as name:
            out.append(name.read().strip())
    return [name for name in out if name.startswith("kvzc")]
