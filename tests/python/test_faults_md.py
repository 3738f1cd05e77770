"""Faults of others (shared/reference/faults.md) that no test of another file stands for."""

# Rows that are tested elsewhere:
#
# REG-02, REG-04  test_register::test_registered_twice..., test_close_twice_is_one_close
# REG-03          test_register::test_a_refused_group_leaves_nothing..., test_overlapping_tensors...
# REG-06          here for the seam; its failing half in test_fault_transport::test_some_failures...
# REG-16          test_fault_transport::test_a_lost_completion_is_a_timeout_until_it_is_cancelled
# REG-18          test_private_memory::test_scattered_blocks_of_every_kind_of_memory...
# REG-21          test_handles::test_every_truncation_is_refused, test_every_flipped_bit_is_refused
# REG-22          test_register::test_a_strict_engine_refuses_memory_outside_every_region
# LIFE-03         test_transfers::test_a_wait_that_runs_out..., test_nothing_lands_after_cancel...
# LIFE-04         test_death::test_quarantine_ends_by_itself_when_the_peer_goes_on
# LIFE-05         test_register::test_threads_may_register_while_the_engine_closes
# LIFE-06, -07    test_lifetime::test_a_program_that_never_closes_ends_as_it_would_without_kvzc
# LIFE-11         test_lifetime::test_after_a_fork_the_child_is_refused_and_the_parent_goes_on
# LIFE-13         test_handles::test_a_pickled_handle..., test_regions_and_engines_are_not_pickle...
# LIFE-15         test_share::test_a_tensor_that_leaves_its_storage..., test_register::test_an_mm...
# PEER-01, -04    test_death::test_after_a_restart..., test_handles::test_a_killed_and_restarted...
# PEER-08         test_lifetime::test_a_put_to_an_engine_that_is_gone_fails_at_once
# PEER-12         test_death::test_many_threads_meet_a_restarted_peer_at_once
# PEER-14         test_transfers::test_wait_returns_those_that_have_ended
# COMP-02         test_fault_transport::test_a_post_that_fails_moves_nothing_and_tells_both_sides
# COMP-04         test_fault_transport::test_a_tag_never_overtakes_its_data
# COMP-05, -12    test_arrivals::test_when_a_tag_arrives_its_bytes_are_readable
# COMP-06, -08    test_transfers::test_a_refused_put_posts_nothing
# COMP-09, -10    test_transfers::test_no_more_transfers_run_than_the_engine_was_made_for
# COMP-14         test_lifetime::test_a_writer_killed_in_mid_transfer_is_lost_and_leaves_nothing
# COMP-15, -16    test_transfers::test_wait_for_the_first..., test_two_threads_may_wait...
# LEAK-01         test_death::test_a_standing_peer_is_named_and_can_be_cut_off
# LEAK-02         test_grants::test_transfers_that_run_through_a_revoked_grant_end...
# LEAK-04         test_transfers::test_ten_thousand_deadlines..., test_register::test_many_regist...
# LEAK-07         test_fault_transport::test_some_failures_among_many...
# LEAK-08         test_transfers::test_nothing_lands_after_cancel_returned
# CONT-10         test_cli::test_what_is_low_gets_a_remark
#
# Rows of devices, which kvzc_rdma_faults (tests/cpp/rdma) has as tests, on real verbs that lie:
#
# REG-05, -07     SmallRegionsTest: a limit per registration, crossed at every byte that matters
# REG-06          RefusedTest: the k-th work request of a transfer is refused, for every k
# REG-09          ShortageTest: the second device takes no memory, and nothing is left on the first
# REG-20          requests are at most 1 GiB; LimitTest.ADeviceThatGathersNothing...
# LIFE-04         ShortageTest.OfLuckInDeregisteringIsNoLeak
# LIFE-09, -10    ForkTest
# COMP-02, -08    RefusedTest, which also counts the tags
# COMP-09, -10    ShortQueueTest: thousands of transfers through the shortest queues, each done once
# NETW-10         AddressTest: tables with RoCE v1, link-local and foreign entries, in all orders
# NETW-11         LimitTest: the smaller MTU of both ends
# PERF-05         LimitTest.ADeviceThatIsNotThere...; no explicit choice is replaced
#
# and of networks: test_hosts, tests/softroce/hosts.
#
# Rows that an engine with CPU tensors and no such device cannot have:
#
# REG-11          alignment that a mapping into an NPU wants
# REG-12          pages are the kernel's business: kvzc aligns nothing to them
# LIFE-12         a device runtime in a forked child
# PEER-11         connections that idle away: the kernels' probes keep them
# RACE-02, -08    work queued on a device's stream
# CONT-11         places of memory on several NUMA nodes; this host has one

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import kvzc
import numpy as np
import pytest
import torch
from helpers import Peer, State, leftovers, open_files, run_script, until
from test_private_memory import NOBODY, as_root, become, move, own, own_mapped, start_engine
from views import random_bytes
from wire_client import address

MIB = 1 << 20
ONES = np.ones(8, np.uint8)


def own_empty(state: State, nbytes: int, name: str | None = None, depth: int = 65536) -> str:
    if hasattr(state, "engine"):
        state.engine.close()
    state.engine = kvzc.Engine(name, default_timeout=20, arrival_depth=depth)
    state.cache = kvzc.empty(nbytes, "uint8")
    state.region = state.engine.register(state.cache)
    text: str = state.region.handle().to_text()
    return text


def cache_of(state: State) -> bytes:
    memory: bytes = state.cache.tobytes()
    return memory


def handle_at(owner: Peer, *args: Any) -> kvzc.RemoteHandle:
    return kvzc.RemoteHandle.from_text(owner.call(own_empty, *args))


def counts(engine: kvzc.Engine) -> dict[str, int]:
    names = "regions", "storages", "grants", "transfers_running", "arrivals_pending"
    return {name: engine.stats()[name] for name in names}


# ---- REG ----


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(64, dtype=torch.uint8),
        lambda: np.arange(64, dtype=np.uint8),
        lambda: memoryview(bytearray(range(64))),
    ],
    ids=["torch", "numpy", "buffer"],
)
def test_reg_06_a_range_over_the_seam_of_two_regions_moves_whole(
    engine: kvzc.Engine, make: Callable[[], Any]
) -> None:
    source = make()
    cache = kvzc.empty(32, "uint8")
    with (
        engine.register(cache) as region,
        engine.register(source[:32]),
        engine.register(source[32:]),
    ):
        engine.put(source[16:48], region.handle()).wait()
        assert cache.tolist() == list(range(16, 48))
        cache[:] = 9
        engine.get(source[16:48], region.handle()).wait()
    assert bytes(source[16:48].tolist()) == bytes([9]) * 32
    assert bytes(source[:16].tolist()) == bytes(range(16))


def test_reg_19_offsets_beyond_2_and_4_gib_are_those_that_were_meant(engine: kvzc.Engine) -> None:
    size = 5 << 30
    no_reserve = 0x4000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    memory = mmap.mmap(-1, size, flags=flags)  # Takes no more than the pages that are touched.
    array = np.frombuffer(memory, np.uint8)
    source = random_bytes(1, 4096)
    back = np.zeros(4096, np.uint8)
    offsets = [2**31 - 1, 2**31 + 8192, 2**32 - 8, 2**32 + 8192, size - 4096]
    with engine.register(array) as region:
        handle = region.handle()
        for offset in offsets:
            engine.put(source, handle[offset : offset + 4096]).wait()
            engine.get(back, handle[offset : offset + 4096]).wait()
            assert np.array_equal(back, source)
            assert np.array_equal(array[offset : offset + 4096], source)
            array[offset : offset + 4096] = 0
            back[:] = 0
        engine.put(source[:2], handle[: 2**32 + 1 : 2**32]).wait()
        assert (array[0], array[2**32]) == (source[0], source[1])
        array[:: 2**32] = 0
        for offset in offsets:  # Where 31 or 32 bits of an offset would have led.
            for short in (offset % 2**31, offset % 2**32):
                assert not array[short : short + 8192].any()
    del array
    memory.close()


# ---- LIFE ----

NEIGHBOURS = """
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of fork() with threads.
import kvzc
import numpy as np
page = np.zeros(3 * 4096, np.uint8)
engine = kvzc.Engine(default_timeout=10)
region = engine.register(page[5000:7048])
mapped = kvzc.empty(8192, "uint8")
other = engine.register(mapped[100:200])
engine.put(np.ones(2048, np.uint8), region.handle()).wait()
pid = os.fork()
if pid == 0:
    page[:] = 7
    mapped[:100] = 7
    os._exit(11 if (page == 7).all() else 12)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 11
assert page.sum() == 2048
engine.put(np.full(2048, 2, np.uint8), region.handle()).wait()
assert page.sum() == 4096
print("done")
"""


def test_life_09_a_forked_child_may_write_beside_registered_bytes() -> None:
    ended = run_script(NEIGHBOURS)
    assert ended.status == 0, ended.errors
    assert ended.output == "done\n"
    assert ended.errors == ""


def fork_then_write(state: State, value: int) -> int:
    """Its pages part from the child's; what is registered is this process's."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    subprocess.run([sys.executable, "-S", "-c", ""], check=True)
    state.bytes[:] = value
    return pid


def value_of(state: State) -> set[int]:
    return set(state.bytes.tolist())


@pytest.mark.parametrize("kind", ["torch", "numpy", "mmap"])
def test_life_10_private_memory_is_still_the_parents_after_a_fork(
    engine: kvzc.Engine, peer: Peer, kind: str
) -> None:
    handle = kvzc.RemoteHandle.from_text(peer.call(own, kind, 100_000))
    local = np.zeros(100_000, np.uint8)
    engine.put(local, handle).wait()
    child = peer.call(fork_then_write, 5)
    try:
        engine.get(local, handle).wait()
        assert (local == 5).all()
        engine.put(local + 1, handle).wait()
        assert peer.call(value_of) == {6}
    finally:
        os.kill(child, 9)


# ---- PEER ----


def test_peer_05_a_view_that_was_prepared_before_its_owner_registered_anew_is_refused(
    engine: kvzc.Engine,
) -> None:
    cache = kvzc.empty((4, 8), "uint8")
    with kvzc.Engine(default_timeout=10) as owner:
        region = owner.register(cache)
        prepared = region.handle()[[3, 1]]
        done = engine.put(np.ones((2, 8), np.uint8), prepared)
        done.wait()
        region.close()
        with owner.register(cache) as again:
            with pytest.raises(kvzc.Revoked):
                engine.put(np.full((2, 8), 9, np.uint8), prepared).wait()
            assert cache[:, 0].tolist() == [0, 1, 0, 1]
            engine.put(np.full((2, 8), 2, np.uint8), again.handle()[[3, 1]]).wait()
            assert cache[:, 0].tolist() == [0, 2, 0, 2]
        done.wait()
        assert (done.error, done.nbytes, done.runs) == (None, 16, 2)


@pytest.mark.parametrize("way", ["silent", "closes", "half", "garbage"])
def test_peer_07_a_handshake_that_never_ends_is_a_named_error_and_may_be_tried_again(
    way: str,
) -> None:
    name = f"handshake-{os.getpid()}-{way}"
    accepted: list[socket.socket] = []

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                one = listener.accept()[0]
                accepted.append(one)
                if way == "closes":
                    one.close()
                elif way != "silent":
                    one.send(b"\2\0\0\0\xff" if way == "half" else b"GET / HTTP/1.1\r\n\r\n")

    # A handle of an engine that has ended, whose name somebody else has taken.
    with kvzc.Engine(name) as gone, gone.register(kvzc.empty(8, "uint8")) as region:
        handle = kvzc.RemoteHandle.from_text(region.handle().to_text())
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        contextlib.ExitStack() as ending,
        kvzc.Engine(default_timeout=20, connect_timeout=0.3) as engine,
    ):
        listener.bind(address(name))
        listener.listen()
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        ending.callback(lambda: [one.close() for one in accepted])
        ending.callback(server.join, 10)
        ending.callback(listener.shutdown, socket.SHUT_RDWR)
        for _ in range(3):
            start = time.monotonic()
            with pytest.raises(kvzc.Error) as raised:
                engine.put(ONES, handle).wait()
            assert time.monotonic() - start < 5
            expected = {"silent": kvzc.TimedOut, "closes": kvzc.PeerLost}
            assert isinstance(raised.value, expected.get(way, kvzc.ProtocolError))
            if way == "silent":
                assert "handshake" in str(raised.value)
        if way in expected:
            assert len(accepted) == 3  # Each was an attempt of its own.
        assert engine.stats() | {"transfers_running": 0, "peers": 0} == engine.stats()


def storm(state: State, text: str) -> None:
    """Tags and bytes without end, while others come in."""
    handle = kvzc.RemoteHandle.from_text(text)
    while True:
        state.engine.put(ONES, handle, notify=b"storm").wait()
        state.engine.arrivals.poll()


def test_peer_13_a_peer_killed_anywhere_in_the_shared_queues_blocks_nobody(
    engine: kvzc.Engine,
) -> None:
    rng = random.Random(5)
    with engine.register(kvzc.empty(8, "uint8")) as region:
        me = region.handle()
        for _ in range(12):
            with Peer() as victim:
                back = handle_at(victim, 8)
                victim.start(storm, me.to_text())
                until(engine.arrivals.poll)
                killer = threading.Timer(rng.uniform(0.005, 0.05), victim.kill)
                killer.start()
                start = time.monotonic()
                with pytest.raises(kvzc.PeerLost):
                    while time.monotonic() < start + 10:
                        engine.put(ONES, back, notify=b"back").wait()
                        engine.arrivals.poll()
                killer.join()
                engine.put(ONES, me, notify=b"still here").wait()
                until(lambda: any(a.tag == b"still here" for a in engine.arrivals.poll()))


# ---- COMP ----


def put_and_fall_asleep(state: State, text: str, nbytes: int) -> None:
    """Starts a transfer and calls kvzc no more."""
    state.engine = kvzc.Engine(default_timeout=20)
    state.source = np.full(nbytes, 6, np.uint8)
    handle = kvzc.RemoteHandle.from_text(text)
    state.transfer = state.engine.put(state.source, handle, notify=b"t")


@pytest.mark.parametrize("nbytes", [1, 24 * MIB])
def test_comp_17_a_transfer_needs_no_second_call_of_its_sender(
    engine: kvzc.Engine, peer: Peer, nbytes: int
) -> None:
    cache = kvzc.empty(nbytes, "uint8")
    with engine.register(cache) as region:
        peer.call(put_and_fall_asleep, region.handle().to_text(), nbytes)
        tags: list[bytes] = []
        until(lambda: tags.extend(each.tag for each in engine.arrivals.poll()) or tags)
        assert tags == [b"t"]
        assert (cache == 6).all()


# ---- RACE ----


def test_race_03_a_source_may_be_reused_as_soon_as_its_put_is_done(
    engine: kvzc.Engine, shared_peer: Peer
) -> None:
    nbytes = 2 * MIB
    handle = handle_at(shared_peer, nbytes)
    source = np.zeros(nbytes, np.uint8)
    for value in range(1, 15):
        size = nbytes >> (value % 7 * 3)
        source[:size] = value
        engine.put(source[:size], handle[:size]).wait()
        source[:] = 0xEE
        assert set(shared_peer.call(cache_of)[:size]) == {value}


def test_race_06_a_soak_with_blocks_that_change_hands_never_shows_a_foreign_byte() -> None:
    """Each block is granted to one request after the other, and some are aborted."""
    blocks, nbytes = 32, 20_000
    cache = kvzc.empty((blocks, nbytes), "uint8")
    rng = random.Random(9)
    aborted = 0
    with (
        kvzc.Engine(default_timeout=5) as owner,
        kvzc.Engine(default_timeout=5) as writer,
        owner.register(cache) as region,
    ):
        for request in range(1500):
            ids = rng.sample(range(blocks), rng.randint(1, 4))
            source = random_bytes(request, len(ids) * nbytes).reshape(len(ids), nbytes)
            tag = b"%d" % request
            grant = region[ids].grant("put")
            transfer = writer.put(source, grant.handle(), notify=tag)
            if rng.random() < 0.3:
                if rng.random() < 0.5:
                    transfer.cancel()
                else:
                    grant.revoke()
                cache[ids] = 0xEE  # The blocks are somebody else's from here on.
                aborted += owner.arrivals.wait(tag).error is not None
                assert (cache[ids] == 0xEE).all(), request
            else:
                assert owner.arrivals.wait(tag).error is None
                assert np.array_equal(cache[ids], source), request
            grant.revoke()
        assert aborted > 10
        assert counts(owner) == {
            "regions": 1, "storages": 1, "grants": 0,
            "transfers_running": 0, "arrivals_pending": 0,
        }  # fmt: skip


def test_race_07_one_of_two_readers_may_leave(engine: kvzc.Engine, shared_peer: Peer) -> None:
    handle = handle_at(shared_peer, 1000)
    text = handle.to_text()
    with kvzc.Engine(default_timeout=10) as first:
        mine = kvzc.RemoteHandle.from_text(text)
        for reader, by in ((first, mine), (engine, handle)):
            reader.put(np.full(1000, 3, np.uint8), by).wait()
        first.connect(mine)
    del mine
    gc.collect()
    back = np.zeros(1000, np.uint8)
    engine.get(back, handle).wait()
    assert (back == 3).all()


def test_race_09_a_missing_shard_is_an_error_before_a_byte_moves(engine: kvzc.Engine) -> None:
    whole = {name: kvzc.empty(8, "uint8") for name in ("shard.0", "shard.1")}
    with engine.register(whole) as region, engine.register({"shard.0": ONES.copy()}) as local:
        with pytest.raises(kvzc.LayoutMismatch):
            engine.put(local, region.handle(), notify=b"t")
        with pytest.raises(kvzc.LayoutMismatch):
            engine.get(local, region.handle(), notify=b"t")
        assert engine.arrivals.poll() == []
    assert not any(each.any() for each in whole.values())


# ---- LEAK ----


def test_leak_06_a_refusal_at_any_step_leaves_every_count_as_it_was(engine: kvzc.Engine) -> None:
    class Array(np.ndarray[Any, Any]):
        pass

    watched: list[Any] = []

    def local(count: int = 8) -> Any:
        made = np.ones(count, np.uint8).view(Array)
        watched.append(weakref.ref(made))
        return made

    with engine.register(kvzc.empty((2, 8), "uint8")) as region:
        handle, put_only = region.handle(), region.grant("put").handle()
        revoked = region.grant()
        old = revoked.handle()
        revoked.revoke()
        engine.connect(handle)
        files, before = open_files(), counts(engine)
        for use in (
            lambda: engine.put(local(), handle),  # Shapes differ.
            lambda: engine.put(local(), handle[0], notify=b"x" * 241),
            lambda: engine.put(local(), handle[0], deadline=-1),
            lambda: engine.put(local(), handle[0], after=5),
            lambda: engine.put(local(), handle[[0, 0]][0, :4]),
            lambda: engine.get(local(), put_only[0]),
            lambda: engine.put_many([(local(), handle[0]), (local(), handle[0])]),
            lambda: engine.put_many([(local(), handle[0]), (local(), old[1])]),
            lambda: engine.put_many([(local(), handle[0]), 5]),
            lambda: engine.put(local(), old[0], notify=b"t").wait(),
            lambda: engine.get(local(), old[0]).wait(),
            lambda: engine.register({"a": local(), "b": 5}),
            lambda: engine.register({"a": local(), "b": local(0)}),
            lambda: region.grant("neither"),
            lambda: engine.notify(5, b"t"),  # type: ignore[arg-type]
        ):
            for _ in range(3):
                with pytest.raises(Exception) as raised:
                    use()
                assert isinstance(raised.value, kvzc.Error | ValueError | TypeError)
                del raised
        assert counts(engine) | {"arrivals_pending": 0} == before
        assert open_files() == files
        gc.collect()
        assert [each() for each in watched] == [None] * len(watched)


def test_leak_11_what_arrived_stays_until_it_is_taken_and_old_block_ids_are_refused(
    engine: kvzc.Engine,
) -> None:
    cache = kvzc.empty((8, 16), "uint8")
    with kvzc.Engine(default_timeout=10) as writer, engine.register(cache) as region:
        first = region[[1, 2]].grant("put")
        old = first.handle()
        writer.put(np.full((2, 16), 1, np.uint8), old, notify=b"chunk 0").wait()
        # Preempted before anybody looked: other blocks, so another grant.
        first.revoke()
        second = region[[6, 5]].grant("put")
        with pytest.raises(kvzc.Revoked):
            writer.put(np.full((2, 16), 9, np.uint8), old, notify=b"chunk 1").wait()
        writer.put(np.full((2, 16), 2, np.uint8), second.handle(), notify=b"chunk 2").wait()
        assert engine.arrivals.wait(b"chunk 2").error is None
        assert engine.arrivals.wait(b"chunk 0").error is None
        assert isinstance(engine.arrivals.wait(b"chunk 1").error, kvzc.Revoked)
        assert cache[:, 0].tolist() == [0, 1, 1, 0, 0, 2, 2, 0]


# ---- CONT ----

NO_MORE_MEMORY = """
import resource, signal, sys
import kvzc
import numpy as np
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with kvzc.Engine(default_timeout=10) as engine:
    handle = kvzc.RemoteHandle.from_text(sys.argv[1])
    source = np.ones(handle.nbytes, np.uint8)
    engine.connect(handle)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # Of memfds too.
    try:
        kvzc.empty(4096, "uint8")
    except kvzc.LimitExceeded:
        print("no more", flush=True)
    for i in range(200):
        engine.put(source, handle, notify=b"t").wait()
        engine.get(source, handle).wait()
print("done", flush=True)
"""


def test_cont_02_what_runs_needs_no_more_shared_memory(engine: kvzc.Engine) -> None:
    with engine.register(kvzc.empty(1 << 16, "uint8")) as region:
        ended = run_script(NO_MORE_MEMORY, region.handle().to_text())
        assert ended.status == 0, ended.errors
        assert ended.output == "no more\ndone\n"
        assert len(engine.arrivals.wait(b"t", 200)) == 200


ATTACHES = """
import sys
import kvzc
handle = kvzc.RemoteHandle.from_text(sys.argv[1])
kvzc.put(bytes([int(sys.argv[2])]) * 8, handle).wait(10)
"""


def attach_and_exit(state: State, text: str, value: int) -> None:
    kvzc.put(bytes([value]) * 8, kvzc.RemoteHandle.from_text(text)).wait(10)


def test_cont_04_who_attaches_and_exits_takes_nothing_with_him(engine: kvzc.Engine) -> None:
    cache = kvzc.empty(8, "uint8")
    before = leftovers()
    with engine.register(cache) as region:
        text = region.handle().to_text()
        for value in (1, 2):
            ended = run_script(ATTACHES, text, str(value))
            assert (ended.status, ended.errors) == (0, "")  # And no tracker complains.
            assert (cache == value).all()
        for value in (3, 4):
            with Peer() as other:
                other.call(attach_and_exit, text, value)
            assert (cache == value).all()
        cache[:] = 5
        engine.put(ONES * 6, region.handle()).wait()
        assert (cache == 6).all()
    assert leftovers() == before


def test_cont_05_seventy_thousand_registrations_need_no_mapping_each(engine: kvzc.Engine) -> None:
    cache = kvzc.empty((1000, 8), "uint8")
    with open("/proc/self/maps") as maps:
        before = len(maps.readlines())
    files = open_files()
    regions = [engine.register(cache[i % 1000]) for i in range(70_000)]
    with open("/proc/self/maps") as maps:
        assert len(maps.readlines()) < before + 500
    assert open_files() == files
    for i in (0, 999, 69_999):
        engine.put(ONES * (i % 200), regions[i].handle()).wait()
        assert (cache[i % 1000] == i % 200).all()
    for region in regions:
        region.close()
    assert counts(engine) | {"regions": 0, "storages": 0, "grants": 0} == counts(engine)


FEW_FILES = """
import resource
import kvzc
import numpy as np
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with kvzc.Engine(default_timeout=10) as engine:
    cache = kvzc.empty((500, 8), "uint8")
    regions = [engine.register(cache[i]) for i in range(500)]
    regions += [engine.register(np.zeros(8, np.uint8)) for i in range(500)]
    for region in regions:
        engine.put(np.ones(8, np.uint8), region.handle()).wait()
    assert cache.all()
    made, others = [], []
    try:
        while True:
            made.append(kvzc.empty(8, "uint8"))
    except kvzc.LimitExceeded as error:
        assert "64" in str(error), error
        print("empty")
    made.clear()
    try:
        while True:
            others.append(kvzc.Engine(default_timeout=10))
            others[-1].connect(regions[0].handle())
    except kvzc.Error as error:
        assert not isinstance(error, kvzc.TimedOut), error
        print("engines")
    for other in others:
        other.close()
    engine.put(np.ones(8, np.uint8), regions[-1].handle()).wait()
print("done")
"""


def test_cont_06_a_thousand_registrations_fit_into_64_descriptors() -> None:
    ended = run_script(FEW_FILES)
    assert ended.status == 0, ended.errors
    assert ended.output == "empty\nengines\ndone\n"


EVERY_SHORTAGE = """
import os
import resource
import signal
import time
import kvzc
import numpy as np

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
memory = np.zeros(8, np.uint8)


def write(text, value, timeout):
    try:
        with kvzc.Engine(default_timeout=timeout) as other:
            other.put(np.full(8, value, np.uint8), text).wait()
            os.write(told, b"y")
            signal.pause()
    except kvzc.Error:
        os.write(told, b"n")
    os._exit(0)


with kvzc.Engine(default_timeout=10, connect_timeout=1) as owner:
    region = owner.register(memory)
    handle = region.handle()
    reached = 0
    for spare in range(24):
        hear, told = os.pipe()
        child = os.fork()
        if child == 0:
            write(handle, spare + 1, 1.5)
        used = set(map(int, os.listdir("/proc/self/fd")))
        free = [number for number in range(1024) if number not in used]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[spare], hard))
        reached += os.read(hear, 1) == b"y"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        deadline = time.monotonic() + 5
        while owner.stats()["peers"] > 0:
            assert time.monotonic() < deadline, spare
            time.sleep(0.002)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        os.close(hear)
        os.close(told)
        with kvzc.Engine(default_timeout=10) as other:
            other.put(np.full(8, spare, np.uint8), handle).wait()
        assert (memory == spare).all()
    assert 8 < reached < 24, reached
print("done")
"""


def test_cont_06_no_shortage_of_descriptors_at_any_point_harms_an_owner() -> None:
    """Each peer is killed in the end, also where no descriptor was left to watch its process."""
    ended = run_script(EVERY_SHORTAGE)
    assert (ended.status, ended.output) == (0, "done\n"), ended.errors


def filter_calls(error_number: int, program: list[tuple[int, int, int, int]]) -> None:
    """Sets a seccomp filter such as containers have, for the threads that are made from now on.

    program: instructions that come after the load of the call's number, and jump to the end or
    one before it: allowed, or failing with error_number.
    """
    program = [
        (0x20, 0, 0, 0),  # Load the call's number.
        *program,
        (0x06, 0, 0, 0x00050000 | error_number),  # SECCOMP_RET_ERRNO
        (0x06, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
    ]
    code = b"".join(struct.pack("<HBBI", *each) for each in program)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    assert libc.prctl(22, 2, ctypes.c_char_p(header), 0, 0) == 0, os.strerror(ctypes.get_errno())


IS_X86 = os.uname().machine == "x86_64"


def forbid_copying(state: State, error_number: int) -> None:
    """process_vm_readv and process_vm_writev"""
    number = 310 if IS_X86 else 270
    filter_calls(error_number, [(0x15, 1, 0, number), (0x15, 0, 1, number + 1)])


def forbid_pidfds(state: State) -> None:
    """pidfd_open, and getsockopt(SO_PEERPIDFD), as on a kernel before 5.3."""
    getsockopt = 55 if IS_X86 else 209
    filter_calls(
        errno.ENOSYS,
        [
            (0x15, 3, 0, 434),
            (0x15, 0, 3, getsockopt),
            (0x20, 0, 0, 16 + 2 * 8),  # Load the third argument.
            (0x15, 0, 1, 77),
        ],
    )


def wait_for_loss(state: State, timeout: float) -> str:
    """Waits for what nobody will send."""
    try:
        state.engine.arrivals.wait(b"never", peer=state.peer, timeout=timeout)
    except kvzc.Error as error:
        return type(error).__name__
    return "arrived"


def take_from(state: State, tag: bytes) -> None:
    state.peer = state.engine.arrivals.wait(tag, timeout=10).peer


def send_tag(state: State, text: str, tag: bytes) -> None:
    state.engine = kvzc.Engine(default_timeout=20)
    state.engine.put(ONES, kvzc.RemoteHandle.from_text(text)[:8], notify=tag).wait()


def test_a_kill_is_noticed_where_the_kernel_has_no_pidfds() -> None:
    with Peer() as owner, Peer() as writer, Peer() as next_writer:
        owner.call(forbid_pidfds)
        text = owner.call(own, "numpy", 64)
        for each in (writer, next_writer):
            each.call(send_tag, text, b"here")
            owner.call(take_from, b"here")
            owner.start(wait_for_loss, 10)
            each.kill()
            assert owner.result(20) == "PeerLost"


@pytest.mark.parametrize("error_number", [1, 38], ids=["EPERM", "ENOSYS"])
def test_cont_08_a_seccomp_filter_is_named_and_mapped_memory_still_works(
    shared_peer: Peer, error_number: int
) -> None:
    with Peer() as writer:
        writer.call(forbid_copying, error_number)
        writer.call(start_engine, [])
        text = shared_peer.call(own, "numpy", 64)
        for direction in ("put", "get"):
            said = writer.call(move, text, direction, 64)
            assert said.startswith("TransportUnavailable")
            for word in ("seccomp", "process_vm_writev", "kvzc.empty", "kvzc.share"):
                assert word in said
            assert writer.call(move, shared_peer.call(own_mapped, 64), direction, 64) == ""


@as_root
def test_cont_09_two_users_may_take_the_same_name_and_do_not_meet() -> None:
    name = f"both-{os.getpid()}"
    with Peer() as stranger, kvzc.Engine(name, default_timeout=10) as engine:
        stranger.call(become, NOBODY, True)
        stranger.call(own_empty, 8, name)
        with engine.register(kvzc.empty(8, "uint8")) as region:
            with kvzc.Engine(default_timeout=10) as writer:
                writer.put(ONES, region.handle(), notify=b"t").wait()
            assert engine.arrivals.wait(b"t").error is None
        assert stranger.call(cache_of) == bytes(8)
