"""The first host: puts to the second in verified rounds while that is killed, comes back, and while
the wire is cut. Argument: the folder of notes. Ends with 0 if everything was as promised.
"""

import subprocess
import sys
import time

import kvzc
from notes import PEER_TIMEOUT_S, Notes, engine

BLOCK = 1 << 20
# Beyond the time that was configured: probes go out once a second, and the guest is emulated.
SLACK_S = 2.0

notes = Notes(sys.argv[1])
source = bytearray(BLOCK)


def say(text: str) -> None:
    print(f"writer: {text}", flush=True)


def put_checked(writer: kvzc.Engine, handle: kvzc.RemoteHandle, round_: int) -> None:
    """One round of a stream: the owner compares every byte and says so."""
    byte, begin = round_ % 251 + 1, round_ % 64 * BLOCK
    source[:] = bytes([byte]) * BLOCK
    tag = f"check {begin} {BLOCK} {byte}".encode()
    transfer = writer.put(source, handle[begin : begin + BLOCK], notify=tag)
    transfer.wait()
    assert transfer.transport == "rdma"
    assert writer.arrivals.wait(b"good", timeout=60).error is None


def lost_after(writer: kvzc.Engine, handle: kvzc.RemoteHandle) -> float:
    """Puts on until the peer is lost; gives the seconds from the last sign of life."""
    alive = time.monotonic()
    round_ = 0
    while True:
        try:
            put_checked_quietly(writer, handle, round_)
        except kvzc.PeerLost as error:
            say(f"lost: {error}")
            return time.monotonic() - alive
        alive = time.monotonic()
        round_ += 1


def put_checked_quietly(writer: kvzc.Engine, handle: kvzc.RemoteHandle, round_: int) -> None:
    begin = round_ % 64 * BLOCK
    writer.put(source, handle[begin : begin + BLOCK]).wait()


with engine() as writer:
    handle = kvzc.RemoteHandle.from_text(notes.read("first"))
    peer = writer.connect(handle)
    assert peer.address == "10.9.1.2:7000", peer
    for round_ in range(3):
        put_checked(writer, handle, round_)
    say("three rounds were right")

    # The other guest is killed, as by a power cut, while puts are under way.
    notes.write("kill")
    seconds = lost_after(writer, handle)
    assert seconds < PEER_TIMEOUT_S + SLACK_S, f"known after {seconds:.1f} s"
    say(f"a killed host was known after {seconds:.1f} s")
    assert writer.stats()["peers"] == 0
    assert writer.stats()["transfers_running"] == 0
    began = time.monotonic()
    try:
        writer.put(source, handle[:BLOCK]).wait()
        raise AssertionError("a put to a host that is gone was done")
    except kvzc.PeerLost:
        assert time.monotonic() - began < 1, "a new call did not hear of it at once"

    # It starts again, with the same address: another engine.
    notes.write("restart")
    fresh = kvzc.RemoteHandle.from_text(notes.read("second"))
    for round_ in range(3):
        put_checked(writer, fresh, round_)
    say("after its restart three rounds were right")
    try:
        writer.put(source, handle[:BLOCK]).wait()
        raise AssertionError("an old handle reached the new engine")
    except kvzc.StaleHandle as error:
        say(f"the old handle: {error}")

    # The wire is cut and mended: the same engine there, the same handle, another connection.
    cut = subprocess.Popen(
        ["sh", "-c", "sleep 1; ip link set eth0 down; sleep 9; ip link set eth0 up"]
    )
    seconds = lost_after(writer, fresh)
    assert seconds < PEER_TIMEOUT_S + SLACK_S, f"known after {seconds:.1f} s"
    say(f"a cut wire was known after {seconds:.1f} s")
    assert cut.wait() == 0
    end = time.monotonic() + 40
    while True:
        try:
            put_checked(writer, fresh, 7)
            break
        except (kvzc.PeerLost, kvzc.TimedOut) as error:
            assert time.monotonic() < end, f"the network is back, the peer is not: {error}"
            time.sleep(0.5)
    say("with the wire mended the same handle works again")
notes.write("done")
