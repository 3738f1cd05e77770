"""Two guests as two hosts, one of which is killed. Needs the machine that has QEMU."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from notes import Notes

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
BOOT = ROOT / "tests/softroce/boot.sh"


class Guest:
    """A guest that runs one command; its output goes to a file."""

    def __init__(self, wire: str, log: Path, *command: str | Path) -> None:
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                # One processor each: two guests share the two of a small machine.
                [BOOT, "-c", "1", "-t", "1500", "-p", wire, "--", *command],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def power_cut(self) -> None:
        """Ends the machine with everything in it."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        if self.process.poll() is None:
            self.power_cut()


@pytest.fixture
def wire() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


@pytest.fixture
def guests() -> Iterator[list[Guest]]:
    made: list[Guest] = []
    yield made
    for guest in made:
        guest.end()


def test_a_killed_host_a_restarted_one_and_a_cut_wire(
    wire: str, guests: list[Guest], tmp_path: Path
) -> None:
    notes = Notes(str(tmp_path))
    writer = Guest(
        f"listen:{wire}", tmp_path / "writer.log", sys.executable, HERE / "writer.py", tmp_path
    )
    guests.append(writer)

    def start_owner(name: str) -> Guest:
        log = tmp_path / "owner.log"
        owner = Guest(f"connect:{wire}", log, sys.executable, HERE / "owner.py", tmp_path, name)
        guests.append(owner)
        return owner

    def note(name: str) -> None:
        end = time.monotonic() + 240
        while not (tmp_path / name).exists():
            assert writer.process.poll() is None and time.monotonic() < end, words()
            time.sleep(0.1)

    def words() -> str:
        logs = (tmp_path / "writer.log", tmp_path / "owner.log")
        return "\n".join(f"{log.name}:\n{log.read_text()}" for log in logs if log.exists())

    owner = start_owner("first")
    note("kill")
    time.sleep(1)  # In the middle of its stream of puts.
    owner.power_cut()
    note("restart")
    start_owner("second")
    note("done")
    assert writer.process.wait(60) == 0, words()
    print(words())
    assert notes.read("done") == ""


@pytest.mark.skipif(
    "KVZC_DEMO" not in os.environ, reason="two guests import torch: a quarter of an hour"
)
@pytest.mark.parametrize("options", [[], ["--corrupt"]], ids=["equal", "corrupt"])
def test_the_demo_across_two_hosts(
    wire: str, guests: list[Guest], tmp_path: Path, options: list[str]
) -> None:
    remote = f"{sys.executable} {HERE / 'remote.py'}"
    guests.append(
        Guest(
            f"listen:{wire}",
            tmp_path / "decode.log",
            *[sys.executable, HERE / "remote.py", "serve", "10.9.1.1:9000", sys.executable],
        )
    )
    log = tmp_path / "demo.log"
    demo = Guest(
        f"connect:{wire}",
        log,
        *[sys.executable, "-m", "kvzc", "demo", "--transport", "rdma", *options],
        *["--decode-python", f"{remote} run 10.9.1.1:9000", "--listen", "10.9.1.1:0"],
        *["--tokens", "32", "--layers", "2", "--generate", "3", "--timeout", "900"],
    )
    guests.append(demo)
    code = demo.process.wait(1480)
    print(log.read_text())
    assert code == 0
    assert "transport   rdma" in log.read_text()
