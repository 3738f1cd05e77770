"""Death, restarts and standstills, seen from the side that lives."""

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import kvzc
import numpy as np
import pytest
from helpers import Peer, State, mappings, open_files, stop, until

MIB = 1 << 20
ONES = np.ones(8, np.uint8)
# A death is known within a second; the rest is for a machine that does other things as well.
KNOWN_S = 1 + 1


# ---- in the other process ----


def own(state: State, nbytes: int, depth: int = 65536, name: str | None = None) -> str:
    state.engine = kvzc.Engine(name, default_timeout=20, arrival_depth=depth)
    state.cache = kvzc.empty(nbytes, "uint8")
    state.region = state.engine.register(state.cache)
    text: str = state.region.handle().to_text()
    return text


def send(state: State, text: str, tag: bytes) -> None:
    if not hasattr(state, "engine"):
        state.engine = kvzc.Engine(default_timeout=20)
    state.engine.put(ONES, kvzc.RemoteHandle.from_text(text)[:8], notify=tag).wait()


def move_until_it_fails(state: State, text: str, nbytes: int, direction: str) -> str:
    """Gives the name of the error that ended it."""
    state.engine = kvzc.Engine(default_timeout=20, copy_threads=1)
    handle = kvzc.RemoteHandle.from_text(text)
    local = np.full(nbytes, 7, np.uint8)
    start = state.engine.put if direction == "put" else state.engine.get
    try:
        start(local[:1], handle[:1], notify=b"begins").wait()
        while True:
            start(local, handle).wait()
    except kvzc.Error as error:
        return type(error).__name__


def fork_and_leave_a_child(state: State, seconds: float) -> int:
    """The child keeps what it inherited, and ends without any cleaning up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        time.sleep(seconds)
        os._exit(0)
    return pid


def fork_with_libc(state: State, seconds: float) -> int:
    """A fork that no hook of Python's sees."""
    import ctypes

    pid: int = ctypes.CDLL(None).fork()
    if pid == 0:
        time.sleep(seconds)
        os._exit(0)
    return pid


def close_all_descriptors(state: State, pipe: int) -> None:
    os.closerange(3, pipe)
    os.closerange(pipe + 1, 1 << 16)


def pipe_of(state: State) -> int:
    """The descriptor by which the test speaks with this process."""
    import gc
    from multiprocessing.connection import Connection

    return max(
        each.fileno()
        for each in gc.get_objects()
        if isinstance(each, Connection) and not each.closed and each.readable and each.writable
    )


def has_pattern(state: State, value: int) -> bool:
    return bool((state.cache == value).all())


def handle_at(owner: Peer, *args: Any) -> kvzc.RemoteHandle:
    return kvzc.RemoteHandle.from_text(owner.call(own, *args))


def seconds_until_lost(wait: Callable[[], Any], end: Callable[[], None], after: float) -> float:
    """Ends the other side while `wait` blocks; gives how long the PeerLost took from then."""
    ended: list[float] = []

    def work() -> None:
        time.sleep(after)
        ended.append(time.monotonic())
        end()

    worker = threading.Thread(target=work)
    worker.start()
    try:
        with pytest.raises(kvzc.PeerLost):
            wait()
        return time.monotonic() - ended[0]
    finally:
        worker.join()


# ---- SIGKILL while this side is blocked ----


@pytest.mark.parametrize("standing", [False, True], ids=["running", "stopped"])
def test_a_wait_for_a_peer_ends_when_it_is_killed(
    engine: kvzc.Engine, peer: Peer, standing: bool
) -> None:
    with engine.register(kvzc.empty(8, "uint8")) as region:
        peer.call(send, region.handle().to_text(), b"hello")
        other = engine.arrivals.wait(b"hello").peer
        if standing:
            stop(peer)
        took = seconds_until_lost(
            lambda: engine.arrivals.wait(b"never", peer=other, timeout=30), peer.kill, 0.2
        )
    assert 0 <= took < KNOWN_S
    assert other.lost
    assert isinstance(other.error, kvzc.PeerLost)


def test_connect_ends_when_the_peer_is_stopped_and_then_killed(
    engine: kvzc.Engine, peer: Peer
) -> None:
    handle = handle_at(peer, 8)
    stop(peer)
    took = seconds_until_lost(lambda: engine.connect(handle, timeout=30), peer.kill, 0.3)
    assert 0 <= took < KNOWN_S


def test_a_put_that_waits_for_the_connection_ends_when_the_peer_is_killed(
    engine: kvzc.Engine, peer: Peer
) -> None:
    handle = handle_at(peer, 8)
    stop(peer)
    transfers = [engine.put(ONES, handle, notify=b"t") for _ in range(50)]
    took = seconds_until_lost(lambda: transfers[0].wait(30), peer.kill, 0.3)
    assert 0 <= took < KNOWN_S
    until(lambda: all(transfer.done for transfer in transfers), KNOWN_S)
    assert engine.stats()["transfers_running"] == 0


@pytest.mark.parametrize("how", ["put", "notify", "peer.notify", "get"])
def test_a_call_that_waits_for_room_ends_when_the_peer_is_killed(
    engine: kvzc.Engine, peer: Peer, how: str
) -> None:
    handle = handle_at(peer, 8, 2)
    other = engine.connect(handle)
    for _ in range(2):
        engine.notify(handle, b"t").wait()
    use = {
        "put": lambda: engine.put(ONES, handle, notify=b"t", accept_timeout=30),
        "get": lambda: engine.get(bytearray(8), handle, notify=b"t", accept_timeout=30),
        "notify": lambda: engine.notify(handle, b"t", accept_timeout=30),
        "peer.notify": lambda: other.notify(b"t", accept_timeout=30),
    }[how]
    took = seconds_until_lost(lambda: use().wait(30), peer.kill, 0.2)
    assert 0 <= took < KNOWN_S


@pytest.mark.parametrize("direction", ["put", "get"])
def test_transfers_in_full_flight_end_when_the_peer_is_killed(
    engine: kvzc.Engine, peer: Peer, direction: str
) -> None:
    nbytes = 32 * MIB
    handle = handle_at(peer, nbytes)
    local = np.zeros(nbytes, np.uint8)
    start = engine.put if direction == "put" else engine.get
    start(local, handle).wait()

    def run() -> None:
        while True:
            start(local, handle).wait(30)

    assert 0 <= seconds_until_lost(run, peer.kill, 0.1) < KNOWN_S
    until(lambda: engine.stats()["transfers_running"] == 0)


def test_everybody_who_waits_hears_of_a_death(engine: kvzc.Engine, peer: Peer) -> None:
    handle = handle_at(peer, 8, 1)
    other = engine.connect(handle)
    engine.notify(handle, b"t").wait()
    ends: list[str] = []

    def wait(call: Callable[[], Any]) -> None:
        try:
            call()
        except kvzc.Error as error:
            ends.append(type(error).__name__)

    waits = [
        lambda: engine.arrivals.wait(b"never", peer=other, timeout=30),
        lambda: engine.arrivals.wait(b"never", 3, peer=other, timeout=30),
        lambda: engine.put(ONES, handle, notify=b"t", accept_timeout=30).wait(30),
        lambda: other.notify(b"t", accept_timeout=30).wait(30),
    ] * 2
    threads = [threading.Thread(target=wait, args=(call,)) for call in waits]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    peer.kill()
    start = time.monotonic()
    for thread in threads:
        thread.join(30)
    assert time.monotonic() - start < KNOWN_S
    assert ends == ["PeerLost"] * len(waits)


def test_an_engine_closes_at_once_after_its_peers_have_died() -> None:
    engine = kvzc.Engine(default_timeout=20)
    region = engine.register(kvzc.empty(32 * MIB, "uint8"))
    text = region.handle().to_text()
    with contextlib.ExitStack() as ending:
        peers = [ending.enter_context(Peer()) for _ in range(4)]
        for each in peers:
            each.start(move_until_it_fails, text, 32 * MIB, "put")
        engine.arrivals.wait(b"begins", 4)
        for each in peers:
            each.kill()
        start = time.monotonic()
        region.revoke()
        region.close()
        engine.close()
        assert time.monotonic() - start < KNOWN_S
    assert engine.stats()["quarantined_bytes"] == 0


# ---- what a dead process leaves ----


@pytest.mark.parametrize("fork", [fork_and_leave_a_child, fork_with_libc], ids=["os", "libc"])
@pytest.mark.parametrize("role", ["owner", "writer"])
def test_a_child_that_lives_on_does_not_hide_its_parents_death(
    engine: kvzc.Engine, peer: Peer, fork: Any, role: str
) -> None:
    with engine.register(kvzc.empty(8, "uint8")) as region:
        if role == "owner":
            other = engine.connect(handle_at(peer, 8))
        else:
            peer.call(send, region.handle().to_text(), b"hello")
            other = engine.arrivals.wait(b"hello").peer
        child = peer.call(fork, 60)
        try:
            took = seconds_until_lost(
                lambda: engine.arrivals.wait(b"never", peer=other, timeout=30), peer.kill, 0.1
            )
            os.kill(child, 0)  # It is alive all that time.
            assert took < KNOWN_S
            start = time.monotonic()
            region.revoke(10)
            assert time.monotonic() - start < KNOWN_S
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("role", ["owner", "writer"])
def test_a_peer_that_closed_its_descriptors_is_lost_though_it_lives(
    engine: kvzc.Engine, peer: Peer, role: str
) -> None:
    with engine.register(kvzc.empty(8, "uint8")) as region:
        if role == "owner":
            other = engine.connect(handle_at(peer, 8))
        else:
            peer.call(send, region.handle().to_text(), b"hello")
            other = engine.arrivals.wait(b"hello").peer
        pipe = peer.call(pipe_of)
        took = seconds_until_lost(
            lambda: engine.arrivals.wait(b"never", peer=other, timeout=30),
            lambda: peer.call(close_all_descriptors, pipe),
            0.1,
        )
        assert took < KNOWN_S
        os.kill(peer.pid, 0)
        start = time.monotonic()
        region.revoke(10)
        assert time.monotonic() - start < KNOWN_S
    peer.kill()


def test_many_deaths_leave_nothing(engine: kvzc.Engine) -> None:
    with engine.register(kvzc.empty(8, "uint8")) as region:
        engine.connect(region.handle())
        before: tuple[int, ...] = ()

        def kept() -> tuple[int, ...]:
            return open_files(), mappings(), engine.stats()["peers"]

        for round_ in range(12):
            with Peer() as one:
                one.call(send, region.handle().to_text(), b"t")
                handle = handle_at(one, 8)
                engine.put(ONES, handle).wait()
                other = engine.arrivals.wait(b"t").peer
                one.kill()
                until(lambda other=other: other.lost)
            del handle, other
            if round_ == 1:
                until(lambda: engine.stats()["peers"] <= 2)
                before = kept()  # The last one may not be gone altogether: no more than that.
        until(lambda: all(now <= then for now, then in zip(kept(), before, strict=True)))


# ---- restarts ----


def test_after_a_restart_the_old_handle_is_stale_and_a_fresh_one_works(
    engine: kvzc.Engine,
) -> None:
    name = f"restarts-{os.getpid()}"
    with Peer() as first, Peer() as second, Peer() as third:
        olds = []
        for life, owner in enumerate((first, second, third)):
            handle = handle_at(owner, 8, 65536, name)
            for old in olds:
                for use in (
                    lambda old=old: engine.put(ONES * 99, old).wait(),
                    lambda old=old: engine.get(bytearray(8), old).wait(),
                    lambda old=old: engine.notify(old, b"t").wait(),
                    lambda old=old: engine.connect(old),
                ):
                    with pytest.raises((kvzc.StaleHandle, kvzc.PeerLost)) as raised:
                        use()
                    assert isinstance(raised.value, ConnectionError)
            # Whoever has not met the dead one hears what is the matter.
            with kvzc.Engine(default_timeout=10) as stranger:
                for old in olds:
                    fresh = kvzc.RemoteHandle.from_bytes(old.to_bytes())
                    with pytest.raises(kvzc.StaleHandle):
                        stranger.put(ONES * 99, fresh).wait()
            engine.put(ONES * life, handle, notify=b"t").wait()
            assert owner.call(has_pattern, life)
            olds.append(handle)
            owner.kill()


def test_many_threads_meet_a_restarted_peer_at_once(engine: kvzc.Engine) -> None:
    """PEER-12."""
    name = f"again-{os.getpid()}"
    with Peer() as first, Peer() as second:
        engine.put(ONES, handle_at(first, 8, 65536, name)).wait()
        first.kill()
        handle = handle_at(second, 8, 65536, name)
        ends: list[Any] = []
        threads = [
            threading.Thread(target=lambda: ends.append(engine.put(ONES, handle).wait()))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert ends == [None] * 8
        until(lambda: engine.stats()["peers"] == 1)


# ---- standstill: the fence and its force ----


def standstills(engine: kvzc.Engine, cache: Any, direction: str) -> Iterator[tuple[Any, Peer]]:
    """A peer that is stopped somewhere in its copying, again and again."""
    with Peer() as writer:
        for _ in range(60):
            region = engine.register(cache)
            text = region.handle().to_text()
            writer.start(move_until_it_fails, text, len(cache), direction)
            engine.arrivals.wait(b"begins")
            time.sleep(0.01)
            stop(writer)
            yield region, writer
            region.close()


@pytest.mark.parametrize("direction", ["put", "get"])
def test_a_standing_peer_is_named_and_can_be_cut_off(engine: kvzc.Engine, direction: str) -> None:
    """LEAK-01: then its blocks can be given to somebody else, whenever it goes on."""
    cache = kvzc.empty(32 * MIB, "uint8")
    held = 0
    for region, writer in standstills(engine, cache, direction):
        start = time.monotonic()
        try:
            region.revoke(0.2)
        except kvzc.TimedOut as error:
            held += 1
            assert str(writer.pid) in str(error)
            assert engine.stats()["quarantined_bytes"] == cache.nbytes
            region.revoke(0.2, force=True)
        assert time.monotonic() - start < 10
        assert engine.stats()["quarantined_bytes"] == 0
        cache[:] = 9  # Another request has the blocks now.
        writer.signal(signal.SIGCONT)
        assert writer.result() in ("Revoked", "PeerLost")
        assert (cache == 9).all()
        if held == 3:
            return
    pytest.fail("the writer was seldom stopped in a chunk")


def test_quarantine_ends_by_itself_when_the_peer_goes_on(engine: kvzc.Engine) -> None:
    cache = kvzc.empty(32 * MIB, "uint8")
    for region, writer in standstills(engine, cache, "put"):
        with contextlib.suppress(kvzc.TimedOut):
            region.revoke(0.1)
        held = engine.stats()["quarantined_bytes"] == cache.nbytes
        if held:
            with pytest.raises(kvzc.TimedOut):
                region.revoke(0)
        writer.signal(signal.SIGCONT)
        assert writer.result() == "Revoked"  # It was never cut off.
        until(lambda: engine.stats()["quarantined_bytes"] == 0)
        region.revoke(5)
        cache[:] = 9
        assert (cache == 9).all()
        if held:
            return
    pytest.fail("the writer was never stopped in a chunk")


def test_a_cut_off_peer_may_come_back(engine: kvzc.Engine) -> None:
    cache = kvzc.empty(32 * MIB, "uint8")
    for region, writer in standstills(engine, cache, "put"):
        with contextlib.suppress(kvzc.TimedOut):
            region.revoke(0.1)
        held = engine.stats()["quarantined_bytes"] > 0
        region.revoke(0.1, force=True)
        writer.signal(signal.SIGCONT)
        writer.result()
        # With a new engine, for it has lost the old one's road for good.
        fresh = region.handle()
        writer.call(new_engine)
        writer.call(send, fresh.to_text(), b"back")
        assert engine.arrivals.wait(b"back").error is None
        if held:
            return
    pytest.fail("the writer was never stopped in a chunk")


def new_engine(state: State) -> None:
    state.engine.close()
    del state.engine


def test_other_peers_and_grants_go_on_while_one_stands_still(engine: kvzc.Engine) -> None:
    cache = kvzc.empty(16 * MIB, "uint8")
    other_cache = kvzc.empty(8, "uint8")
    with Peer() as friend, engine.register(other_cache) as other:
        for region, writer in standstills(engine, cache, "put"):
            try:
                region.revoke(0.1)
                held = False
            except kvzc.TimedOut:
                held = True
            friend.call(send, other.handle().to_text(), b"friend")
            assert engine.arrivals.wait(b"friend").error is None
            other.revoke(5)  # A fence for others does not wait for it.
            region.revoke(0.1, force=True)
            friend.call(send, region.handle().to_text(), b"friend")
            assert engine.arrivals.wait(b"friend").error is None
            writer.signal(signal.SIGCONT)
            writer.result()
            if held:
                return
    pytest.fail("the writer was never stopped in a chunk")


def test_a_killed_stander_leaves_no_quarantine(engine: kvzc.Engine) -> None:
    cache = kvzc.empty(32 * MIB, "uint8")
    for _ in range(30):
        with Peer() as writer, engine.register(cache) as region:
            writer.start(move_until_it_fails, region.handle().to_text(), len(cache), "put")
            engine.arrivals.wait(b"begins")
            time.sleep(0.01)
            stop(writer)
            with contextlib.suppress(kvzc.TimedOut):
                region.revoke(0.1)
            held = engine.stats()["quarantined_bytes"] > 0
            writer.kill()
            start = time.monotonic()
            region.revoke(10)
            assert time.monotonic() - start < KNOWN_S
            until(lambda: engine.stats()["quarantined_bytes"] == 0)
            if held:
                return
    pytest.fail("the writer was never stopped in a chunk")


def test_who_stands_in_the_kernels_own_copying_cannot_be_cut_off(engine: kvzc.Engine) -> None:
    """Nothing shows that it will not go on, so the owner is told to end it."""
    cache = np.zeros(32 * MIB, np.uint8)
    for region, writer in standstills(engine, cache, "put"):
        with contextlib.suppress(kvzc.TimedOut):
            region.revoke(0.1)
        held = engine.stats()["quarantined_bytes"] > 0
        if held:
            with pytest.raises(kvzc.Unsupported, match=f"{writer.pid}.*end it") as raised:
                region.revoke(0.1, force=True)
            assert isinstance(raised.value, NotImplementedError)
            assert engine.stats()["quarantined_bytes"] == cache.nbytes
        writer.signal(signal.SIGCONT)
        assert writer.result() in ("Revoked", "PeerLost")
        region.revoke(10)
        assert engine.stats()["quarantined_bytes"] == 0
        cache[:] = 9
        time.sleep(0.01)
        assert (cache == 9).all()
        if held:
            return
    pytest.fail("the writer was never stopped in a chunk")


def test_a_lost_peer_is_told_also_while_no_more_transfers_fit() -> None:
    with Peer() as standing, Peer() as dead, kvzc.Engine(max_transfers=1) as engine:
        handles = [kvzc.RemoteHandle.from_text(each.call(own, 8)) for each in (standing, dead)]
        engine.put(ONES, handles[1]).wait(20)
        dead.kill()
        until(lambda: not engine.peer_stats()[0]["connected"])
        stop(standing)
        try:
            engine.put(ONES, handles[0])  # Accepted; it waits for a handshake that does not come.
            with pytest.raises(kvzc.PeerLost):
                engine.put(ONES, handles[1], accept_timeout=0)
            with pytest.raises(kvzc.WouldBlock):
                engine.put(ONES, handles[0], accept_timeout=0)
        finally:
            standing.signal(signal.SIGCONT)
