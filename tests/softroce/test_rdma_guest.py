"""The rdma transport from Python, on real verbs.

Run by run.sh in a guest of boot.sh; elsewhere it fails, since the devices are not there.
"""

import ctypes
import mmap
import os
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator

import kvzc
import numpy as np
import pytest
from helpers import Peer, State, until
from wire_client import CHALLENGE, HELLO, REFUSE, HandleBytes, blob


def own(state: State, rows: int, nbytes: int) -> str:
    state.engine = kvzc.Engine(transports=["rdma"], default_timeout=30)
    state.cache = np.zeros((rows, nbytes), np.uint8)  # Any memory will do.
    state.region = state.engine.register(state.cache)
    text: str = state.region.handle().to_text()
    return text


def row(state: State, index: int, tag: bytes) -> bytes:
    arrival = state.engine.arrivals.wait(tag, timeout=30)
    assert arrival.error is None
    return bytes(state.cache[index])


def grant_text(state: State, index: int, access: str) -> str:
    state.grant = state.region[index].grant(access)
    text: str = state.grant.handle().to_text()
    return text


def revoke(state: State) -> None:
    state.grant.revoke(timeout=20)


@pytest.fixture
def engine() -> Iterator[kvzc.Engine]:
    with kvzc.Engine(transports=["rdma"], default_timeout=30) as made:
        yield made


def test_info_lists_devices_ports_and_addresses() -> None:
    reason = {name: text for name, _, text in kvzc._core.transports()}["rdma"]
    for word in ("rxe0", "port 1", "10.9.0.1", "rxe1", "10.9.0.2", "RoCE v2", "software"):
        assert word in reason


def test_a_put_a_tag_and_a_get(engine: kvzc.Engine) -> None:
    with Peer() as owner:
        handle = kvzc.RemoteHandle.from_text(owner.call(own, 8, 300_000))
        source = np.random.default_rng(1).integers(0, 256, (8, 300_000), np.uint8)
        transfer = engine.put(source[[5, 1]], handle[[2, 6]], notify=b"rows")
        transfer.wait()
        assert transfer.transport == "rdma"
        assert owner.call(row, 2, b"rows") == source[5].tobytes()
        back = np.zeros((2, 300_000), np.uint8)
        engine.get(back, handle[[6, 2]]).wait()
        assert (back == source[[1, 5]]).all()


def test_counters_name_the_transport() -> None:
    target = np.zeros(4096, np.uint8)
    with (
        kvzc.Engine("counted") as owner,
        kvzc.Engine("by-default") as near,
        kvzc.Engine("by-device", transports=["rdma"]) as far,
        owner.register(target) as region,
    ):
        handle = region.handle()
        for writer, transport in ((near, "shm"), (far, "rdma")):
            writer.put(np.ones(4096, np.uint8), handle).wait(60)
            (row,) = writer.peer_stats()
            assert (row["name"], row["transport"]) == ("counted", transport)
            assert row["put"]["bytes"] == 4096


def guard(state: State) -> None:
    """From here on no other process copies into or out of this one, as in a container."""
    os.setresuid(65534, 65534, 65534)
    assert ctypes.CDLL(None).prctl(4, 0) == 0  # PR_SET_DUMPABLE


def own_guarded(state: State) -> str:
    guard(state)
    state.engine = kvzc.Engine(default_timeout=30, arrival_depth=4)
    state.region = state.engine.register(np.zeros(64, np.uint8))
    return state.region.handle().to_text()


def take(state: State, tag: bytes) -> None:
    state.engine.arrivals.wait(tag)


def put_guarded(state: State, text: str, tag: bytes) -> str:
    if not hasattr(state, "engine"):
        guard(state)
        state.engine = kvzc.Engine(default_timeout=30)
    transfer = state.engine.put(
        np.ones(64, np.uint8), kvzc.RemoteHandle.from_text(text), notify=tag
    )
    transfer.wait()
    return transfer.transport


def test_a_tag_gives_its_credit_back_the_way_it_came() -> None:
    """Also where that is not the way that the peer prefers: here shm reaches no private memory."""
    with Peer() as owner, Peer() as writer:
        handle = owner.call(own_guarded)
        for i in range(12):  # The inbox holds four.
            assert writer.call(put_guarded, handle, b"%d" % i) == "rdma"
            owner.call(take, b"%d" % i)


def test_a_revoked_grant_takes_nothing_more_and_others_go_on(engine: kvzc.Engine) -> None:
    with Peer() as owner:
        whole = kvzc.RemoteHandle.from_text(owner.call(own, 4, 4096))
        grant = kvzc.RemoteHandle.from_text(owner.call(grant_text, 1, "put"))
        ones = np.ones(4096, np.uint8)
        engine.put(ones, grant).wait()
        with pytest.raises(kvzc.AccessDenied):
            engine.get(np.zeros(4096, np.uint8), grant)
        owner.call(revoke)
        with pytest.raises(kvzc.Revoked):
            engine.put(ones * 2, grant).wait()
        engine.put(ones * 3, whole[2], notify=b"on").wait()
        assert owner.call(row, 2, b"on") == bytes([3]) * 4096
        assert owner.call(bytes_of, 1) == bytes([1]) * 4096


def bytes_of(state: State, index: int) -> bytes:
    return bytes(state.cache[index])


def test_a_killed_owner_is_lost_within_a_second(engine: kvzc.Engine) -> None:
    with Peer() as owner:
        handle = kvzc.RemoteHandle.from_text(owner.call(own, 1, 1 << 20))
        engine.put(np.ones((1, 1 << 20), np.uint8), handle).wait()
        owner.signal(signal.SIGKILL)
        until(lambda: engine.stats()["peers"] == 0, 2)
        with pytest.raises(kvzc.PeerLost):
            engine.put(np.ones((1, 1 << 20), np.uint8), handle).wait()


def test_options_choose_device_and_address() -> None:
    with (
        kvzc.Engine(transports=["rdma"], rdma=kvzc.Rdma(devices=["rxe1"], gid_index=1)) as owner,
        kvzc.Engine(
            transports=["rdma"], rdma=kvzc.Rdma(devices=["rxe1"], always_flush=True)
        ) as writer,
        owner.register(np.zeros(8, np.uint8)) as region,
    ):
        writer.put(np.ones(8, np.uint8), region.handle(), notify=b"t").wait()
        assert owner.arrivals.wait(b"t").error is None
    with pytest.raises(ValueError, match=r"rxe9.*rxe0"):
        kvzc.Engine(transports=["rdma"], rdma=kvzc.Rdma(devices=["rxe9"]))


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=20)


@pytest.fixture
def third_device() -> Iterator[None]:
    """Adds rxe9; like all of them it reaches nobody but itself."""
    run("ip", "link", "add", "roce9", "type", "dummy")
    run("ip", "address", "add", "10.9.0.9/24", "dev", "roce9")
    run("ip", "link", "set", "roce9", "up")
    run("rdma", "link", "add", "rxe9", "type", "rxe", "netdev", "roce9")
    yield
    run("rdma", "link", "delete", "rxe9")
    run("ip", "link", "delete", "roce9")


def own_on(state: State, devices: list[str], nbytes: int) -> str:
    state.engine = kvzc.Engine(transports=["rdma"], rdma=kvzc.Rdma(devices=devices))
    state.cache = np.zeros((1, nbytes), np.uint8)
    state.region = state.engine.register(state.cache)
    text: str = state.region.handle().to_text()
    return text


def test_a_way_that_leads_nowhere_ends_as_a_lost_peer() -> None:
    """Soft-RoCE does not count packets that cannot leave as retries, so no completion says it."""
    with (
        Peer() as owner,
        kvzc.Engine(transports=["rdma"], rdma=kvzc.Rdma(devices=["rxe0", "rxe1"])) as writer,
    ):
        target = kvzc.RemoteHandle.from_text(owner.call(own_on, ["rxe1", "rxe0"], 1 << 20))
        with pytest.raises(kvzc.PeerLost, match=r"10\.9\.0\.\d to 10\.9\.0\.\d.*leads nowhere"):
            writer.put(np.ones((1, 1 << 20), np.uint8), target).wait(30)


@pytest.mark.usefixtures("third_device")
def test_rails_that_lead_nowhere_are_taken_out_beside_one_that_works() -> None:
    nbytes = 4 << 20
    source = np.random.default_rng(2).integers(0, 256, (1, nbytes), np.uint8)
    devices = ["rxe0", "rxe1", "rxe9"]
    with (
        Peer() as owner,
        kvzc.Engine(transports=["rdma"], rdma=kvzc.Rdma(devices=devices)) as writer,
    ):
        target = kvzc.RemoteHandle.from_text(owner.call(own_on, ["rxe0", "rxe9", "rxe1"], nbytes))
        writer.put(source, target, notify=b"first").wait(40)
        assert owner.call(row, 0, b"first") == source.tobytes()
        writer.put(source + 1, target, notify=b"second").wait(40)
        assert owner.call(row, 0, b"second") == (source + 1).tobytes()
        (way,) = [line for line in writer.explain(target).splitlines() if line.startswith("rdma: ")]
        assert "rail 0 rxe0 (10.9.0.1 to 10.9.0.1)" in way
        assert way.count("leads nowhere") == 2


def test_explain_names_the_rails_and_why_not_shared_memory(engine: kvzc.Engine) -> None:
    with Peer() as owner:
        handle = kvzc.RemoteHandle.from_text(owner.call(own, 1, 8))
        lines = engine.explain(handle).splitlines()
    (way,) = [line for line in lines if line.startswith("rdma: ")]
    for word in ("rail 0 rxe0 (10.9.0.1 to 10.9.0.1)", "rail 1 rxe1", "all of them"):
        assert word in way
    assert "not shm: this engine was made without it" in lines


def test_memory_that_no_device_takes_is_refused_when_it_is_registered() -> None:
    with kvzc.Engine(transports=["rdma"]) as engine, tempfile.TemporaryFile() as file:
        file.truncate(8192)
        pages = mmap.mmap(file.fileno(), 8192, flags=mmap.MAP_SHARED)
        file.truncate(4096)  # Its second page is beyond the end now.
        refused = (kvzc.LimitExceeded, kvzc.TransportUnavailable)
        with pytest.raises(refused, match=r"8192 bytes.*rxe0"):
            engine.register(np.frombuffer(pages, np.uint8))
        assert engine.stats()["storages"] == 0


SECRET = "the secret of two hosts"
TCP = 2
STALE_HANDLE = 6  # As Code on the wire.


def own_as_on_another_host(state: State) -> str:
    state.engine = kvzc.Engine(transports=["rdma"], listen="127.0.0.1:0", secret=SECRET)
    state.cache = np.zeros(8, np.uint8)
    state.region = state.engine.register(state.cache)
    given = HandleBytes.of(state.region.handle())
    there = given.reached_at([each for each in given.addresses if each[0] == TCP])
    text: str = there.handle().to_text()
    return text


def test_a_stranger_says_nothing_of_the_peer_that_it_claims_to_be() -> None:
    """Whoever has read a lost peer's handle knows its incarnation, and no key."""
    with (
        Peer() as owner,
        kvzc.Engine(transports=["rdma"], listen="127.0.0.1:0", secret=SECRET) as writer,
        writer.register(np.zeros(8, np.uint8)) as region,
    ):
        target = kvzc.RemoteHandle.from_text(owner.call(own_as_on_another_host))
        writer.put(np.ones(8, np.uint8), target).wait(20)
        owner.signal(signal.SIGKILL)
        until(lambda: writer.stats()["peers"] == 0, 5)

        own, claimed = HandleBytes.of(region.handle()), HandleBytes.of(target)
        host, port = writer.addresses[0].rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=10) as stranger:
            hello = b"KVZC" + struct.pack("<HH", 1, 1) + claimed.incarnation + own.incarnation
            hello += bytes(32) + struct.pack("<Q", own.grant) + blob(b"owner")
            stranger.sendall(struct.pack("<HHI", HELLO, 0, 8 + len(hello)) + hello)
            assert stranger.recv(2) == struct.pack("<H", CHALLENGE)
            refusal = bytes([STALE_HANDLE]) + blob(b"gone")
            stranger.sendall(struct.pack("<HHI", REFUSE, 0, 8 + len(refusal)) + refusal)
            while stranger.recv(4096):  # Until it is put out.
                pass
        time.sleep(0.5)  # By now a put looks for the owner anew.
        with pytest.raises(kvzc.PeerLost, match=r"nobody listens"):
            writer.put(np.ones(8, np.uint8), target).wait(20)


def test_engines_of_one_host_that_have_both_take_shared_memory() -> None:
    with (
        kvzc.Engine() as owner,
        kvzc.Engine() as writer,
        owner.register(kvzc.empty(8, "uint8")) as region,
    ):
        transfer = writer.put(np.ones(8, np.uint8), region.handle())
        transfer.wait()
        assert transfer.transport == "shm"
