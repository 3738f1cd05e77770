"""Notify and arrivals: after the data, exactly once, and with an error when there is one."""

import asyncio
import contextlib
import os
import select
import signal
import threading
import time
from typing import Any

import kvzc
import numpy as np
import pytest
from helpers import Peer, State, open_files, run_script, stop, until

MIB = 1 << 20
ONES = np.ones(8, np.uint8)


class Inbox:
    """An engine that puts to itself; send() is one arrival."""

    def __init__(self, engine: kvzc.Engine) -> None:
        self.engine = engine
        self.arrivals = engine.arrivals
        self.region = engine.register(kvzc.empty(8, "uint8"))
        self.handle = self.region.handle()
        engine.connect(self.handle)

    def send(self, *tags: bytes) -> None:
        for tag in tags:
            self.engine.put(ONES, self.handle, notify=tag).wait()

    def poll(self, most: int = 64) -> list[bytes]:
        return [each.tag for each in self.arrivals.poll(most)]


@pytest.fixture
def inbox(engine: kvzc.Engine) -> Inbox:
    return Inbox(engine)


# ---- order, and exactly once, from another process ----


def writer_start(state: State, text: str, **options: Any) -> None:
    state.engine = kvzc.Engine(default_timeout=20, **options)
    state.handle = kvzc.RemoteHandle.from_text(text)
    state.peer = state.engine.connect(state.handle)


def writer_rounds(state: State, sizes: list[int]) -> None:
    """Round i fills the first sizes[i] bytes with i % 251 + 1, and tells."""
    transfers = []
    for i, size in enumerate(sizes):
        source = np.full(size, i % 251 + 1, np.uint8)
        transfers.append(state.engine.put(source, state.handle[:size], notify=b"round %d" % i))
        # The next one writes the same bytes: it may start when this one was looked at.
        state.engine.arrivals.wait(b"seen %d" % i)
    kvzc.wait(transfers)


def writer_handle(state: State) -> str:
    state.back = state.engine.register(kvzc.empty(1, "uint8"))
    text: str = state.back.handle().to_text()
    return text


def writer_put(state: State, tags: list[bytes]) -> None:
    for tag in tags:
        state.engine.put(ONES, state.handle[:8], notify=tag).wait()


def writer_put_for_ever(state: State, nbytes: int) -> None:
    source = np.full(nbytes, 9, np.uint8)
    while True:
        state.engine.put(source, state.handle[:nbytes], notify=b"more").wait()


def writer_try(state: State, nbytes: int, tag: bytes) -> str:
    """Puts until it fails; gives the name of the error."""
    source = np.full(nbytes, 9, np.uint8)
    try:
        while True:
            state.engine.put(source, state.handle[:nbytes], notify=tag).wait()
    except kvzc.Error as error:
        return type(error).__name__


def test_when_a_tag_arrives_its_bytes_are_readable(engine: kvzc.Engine, shared_peer: Peer) -> None:
    """COMP-05, COMP-12: 300 rounds, small ones and ones that several threads copy."""
    rng = np.random.default_rng(7)
    sizes = [int(2 ** rng.uniform(0, 16)) for _ in range(270)]
    sizes += [int(rng.integers(128 << 10, 6 * MIB)) for _ in range(30)]
    rng.shuffle(sizes)
    cache = kvzc.empty(6 * MIB, "uint8")
    with engine.register(cache) as region:
        shared_peer.call(writer_start, region.handle().to_text())
        back = kvzc.RemoteHandle.from_text(shared_peer.call(writer_handle))
        shared_peer.start(writer_rounds, sizes)
        for i, size in enumerate(sizes):
            cache[size:] = 0xEE
            arrival = engine.arrivals.wait(b"round %d" % i)
            assert arrival.error is None
            assert (cache[:size] == i % 251 + 1).all(), i
            assert (cache[size:] == 0xEE).all(), i
            engine.put(ONES[:1], back, notify=b"seen %d" % i).wait()
        shared_peer.result()
        time.sleep(0.05)
        assert engine.arrivals.poll() == []
        assert engine.stats()["arrivals_arrived"] == engine.stats()["arrivals_taken"] == 300


def test_an_arrival_says_who_and_when(engine: kvzc.Engine, shared_peer: Peer) -> None:
    with engine.register(kvzc.empty(8, "uint8")) as region:
        shared_peer.call(writer_start, region.handle().to_text())
        before = time.monotonic_ns()
        shared_peer.call(writer_put, [b"tag"])
        arrival = engine.arrivals.wait(b"tag")
        assert arrival.tag == b"tag"
        assert arrival.error is None
        assert before <= arrival.arrived_ns <= time.monotonic_ns()
        assert arrival.peer.pid == shared_peer.pid
        assert arrival.peer.uid == os.getuid()
        assert len(arrival.peer.incarnation) == 32
        assert not arrival.peer.lost
        assert arrival.peer.error is None
        assert "b'tag'" in repr(arrival)


def test_each_tag_arrives_exactly_once(inbox: Inbox) -> None:
    tags = [b"%d" % (i % 97) for i in range(2000)]
    inbox.send(*tags)
    got: list[bytes] = []
    until(lambda: got.extend(inbox.poll(7)) or len(got) >= 2000)
    assert got == tags  # One sender's transfers that followed each other come in order.
    time.sleep(0.02)
    assert inbox.poll() == []


# ---- wait ----


def test_wait_takes_the_tag_that_it_names_and_leaves_the_rest(inbox: Inbox) -> None:
    inbox.send(b"a", b"b", b"a", b"c")
    assert inbox.arrivals.wait(b"c").tag == b"c"
    assert inbox.arrivals.wait(b"a").tag == b"a"
    assert inbox.poll() == [b"b", b"a"]


def test_wait_for_several_gives_all_or_none(inbox: Inbox) -> None:
    inbox.send(b"x", b"x")
    with pytest.raises(kvzc.TimedOut, match="3 times"):
        inbox.arrivals.wait(b"x", 3, timeout=0.05)
    inbox.send(b"x", b"x")
    assert [each.tag for each in inbox.arrivals.wait(b"x", 3)] == [b"x"] * 3
    assert inbox.poll() == [b"x"]
    assert inbox.arrivals.wait(b"x", 0, timeout=0) == []
    inbox.send(b"x")
    assert isinstance(inbox.arrivals.wait(b"x", count=1), list)


def test_several_threads_wait_for_one_tag_and_each_gets_one(inbox: Inbox) -> None:
    got: list[Any] = []
    waiters = [
        threading.Thread(target=lambda: got.append(inbox.arrivals.wait(b"t"))) for _ in range(6)
    ]
    for waiter in waiters:
        waiter.start()
    inbox.send(*[b"t"] * 6)
    for waiter in waiters:
        waiter.join(10)
    assert [each.tag for each in got] == [b"t"] * 6
    assert inbox.poll() == []


def test_wait_can_name_the_peer(engine: kvzc.Engine, peer: Peer) -> None:
    inbox = Inbox(engine)
    with engine.register(kvzc.empty(8, "uint8")) as region:
        peer.call(writer_start, region.handle().to_text())
        peer.call(writer_put, [b"hello"])
        other = engine.arrivals.wait(b"hello").peer
        me = engine.connect(inbox.handle)
        inbox.send(b"t")
        with pytest.raises(kvzc.TimedOut):
            engine.arrivals.wait(b"t", peer=other, timeout=0.1)
        peer.call(writer_put, [b"t"])
        assert engine.arrivals.wait(b"t", peer=other).peer.pid == peer.pid
        assert engine.arrivals.wait(b"t", peer=me).peer.pid == os.getpid()
        for wrong in (5, "name", region):
            with pytest.raises((TypeError, RuntimeError)):
                engine.arrivals.wait(b"t", peer=wrong, timeout=0)  # type: ignore[call-overload]


def test_wait_for_a_peer_that_is_killed_raises_within_a_second(
    engine: kvzc.Engine, peer: Peer
) -> None:
    with engine.register(kvzc.empty(8, "uint8")) as region:
        peer.call(writer_start, region.handle().to_text())
        peer.call(writer_put, [b"hello", b"last"])
        other = engine.arrivals.wait(b"hello").peer
        threading.Timer(0.3, peer.signal, [signal.SIGKILL]).start()
        start = time.monotonic()
        with pytest.raises(kvzc.PeerLost) as raised:
            engine.arrivals.wait(b"never", peer=other, timeout=20)
        assert 0.2 < time.monotonic() - start < 0.3 + 2
        assert isinstance(raised.value, ConnectionError)
        assert str(peer.pid) in str(raised.value)
        assert other.lost
        assert isinstance(other.error, kvzc.PeerLost)
        with pytest.raises(kvzc.PeerLost):
            engine.arrivals.wait(b"never", peer=other, timeout=20)
        # What had come before is still there.
        assert engine.arrivals.wait(b"last", peer=other).tag == b"last"
        assert engine.stats()["peers"] == 0


def test_a_stopped_peer_is_not_lost(engine: kvzc.Engine, peer: Peer) -> None:
    with engine.register(kvzc.empty(8, "uint8")) as region:
        peer.call(writer_start, region.handle().to_text())
        peer.call(writer_put, [b"hello"])
        other = engine.arrivals.wait(b"hello").peer
        stop(peer)
        with pytest.raises(kvzc.TimedOut):
            engine.arrivals.wait(b"t", peer=other, timeout=1.5)
        peer.signal(signal.SIGCONT)
        assert not other.lost
        peer.call(writer_put, [b"t"])
        engine.arrivals.wait(b"t", peer=other)


# ---- poll, forget, expiry ----


def test_poll_gives_the_oldest_first_and_no_more_than_asked(inbox: Inbox) -> None:
    inbox.send(b"1", b"2", b"3")
    assert inbox.poll(2) == [b"1", b"2"]
    assert inbox.poll(0) == []
    assert inbox.poll(2) == [b"3"]
    assert inbox.poll() == []
    with pytest.raises((TypeError, ValueError, OverflowError)):
        inbox.arrivals.poll(-1)


def test_poll_leaves_alone_what_somebody_waits_for(inbox: Inbox) -> None:
    got: list[Any] = []
    waiter = threading.Thread(target=lambda: got.extend(inbox.arrivals.wait(b"w", 2)))
    waiter.start()
    time.sleep(0.1)
    inbox.send(b"w", b"other")
    seen: list[bytes] = []
    until(lambda: seen.extend(inbox.poll()) or seen == [b"other"])
    inbox.send(b"w")
    waiter.join(10)
    assert [each.tag for each in got] == [b"w", b"w"]


def test_poll_never_takes_what_somebody_waits_for(inbox: Inbox) -> None:
    """A thread that only polls must not win against a wait, whenever the tag comes."""
    stolen: list[bytes] = []
    is_over = threading.Event()

    def poll_all_the_time() -> None:
        while not is_over.is_set():
            stolen.extend(inbox.poll())

    got: list[Any] = []

    def wait() -> None:
        with contextlib.suppress(kvzc.Closed):
            got.extend(inbox.arrivals.wait(b"w", 300))

    waiter = threading.Thread(target=wait)
    poller = threading.Thread(target=poll_all_the_time)
    waiter.start()
    time.sleep(0.2)  # By now it waits.
    poller.start()
    try:
        for _ in range(300):
            inbox.send(b"w")
            time.sleep(0.002)
            if stolen:
                break
        else:
            waiter.join(10)
    finally:
        is_over.set()
        poller.join()
        inbox.engine.close()
        waiter.join()
    assert stolen == []
    assert len(got) == 300


def test_forget_discards_present_and_future(inbox: Inbox) -> None:
    inbox.send(b"f", b"keep", b"f")
    inbox.arrivals.forget(b"f")
    inbox.send(b"f", b"f")
    assert inbox.poll() == [b"keep"]
    stats = inbox.engine.stats()
    assert stats["arrivals_forgotten"] == 4
    assert stats["arrivals_pending"] == 0
    # Whoever waits for it wants it again.
    waiter = threading.Thread(target=lambda: inbox.arrivals.wait(b"f"))
    waiter.start()
    until(lambda: inbox.send(b"f") or not waiter.is_alive() or time.sleep(0.01))
    waiter.join()


def test_forgetting_ends_after_arrival_ttl() -> None:
    """Else a tag that is used again some day would never arrive any more."""
    with kvzc.Engine(arrival_ttl=0.3, default_timeout=5) as engine:
        inbox = Inbox(engine)
        engine.arrivals.forget(b"f")
        start = time.monotonic()
        got: list[bytes] = []
        until(lambda: inbox.send(b"f") or got.extend(inbox.poll()) or got)
        assert got == [b"f"]
        assert time.monotonic() - start >= 0.3
        assert engine.stats()["arrivals_forgotten"] > 0
        # What is forgotten anew is forgotten for as long again, and other tags never were.
        engine.arrivals.forget(b"f")
        inbox.send(b"f", b"other")
        assert inbox.arrivals.wait(b"other").tag == b"other"


def test_what_is_forgotten_leaves_room() -> None:
    with kvzc.Engine(arrival_depth=4, default_timeout=5) as engine:
        inbox = Inbox(engine)
        inbox.send(*[b"f"] * 4)
        engine.arrivals.forget(b"f")
        inbox.send(*[b"f"] * 20)
        until(lambda: engine.stats()["arrivals_forgotten"] >= 20, 5)
        engine.arrivals.poll()
        assert engine.stats()["arrivals_forgotten"] == 24


def test_what_nobody_takes_expires_and_is_counted() -> None:
    with kvzc.Engine(arrival_ttl=0.2, arrival_depth=8, default_timeout=5) as engine:
        inbox = Inbox(engine)
        inbox.send(*[b"e"] * 8)
        until(lambda: engine.stats()["arrivals_expired"] == 8, 5)
        assert engine.stats()["arrivals_pending"] == 0
        inbox.send(*[b"e"] * 8)  # The room is back.
        assert len(inbox.poll()) == 8


def test_what_somebody_waits_for_does_not_expire() -> None:
    with kvzc.Engine(arrival_ttl=0.2, default_timeout=5) as engine:
        inbox = Inbox(engine)
        got: list[Any] = []
        waiter = threading.Thread(target=lambda: got.extend(engine.arrivals.wait(b"w", 2)))
        waiter.start()
        time.sleep(0.05)
        inbox.send(b"w")
        time.sleep(0.8)
        inbox.send(b"w")
        waiter.join(10)
        assert len(got) == 2


# ---- room ----


def test_a_full_inbox_of_one_sender_does_not_hold_up_another() -> None:
    depth = 3
    with (
        kvzc.Engine(arrival_depth=depth) as owner,
        kvzc.Engine(default_timeout=10) as greedy,
        kvzc.Engine(default_timeout=10) as other,
        owner.register(kvzc.empty(8, "uint8")) as region,
    ):
        # One for each engine: a handle that changes hands is reached anew, and what is accepted
        # before its owner is reached is not refused for want of room.
        handle, again = region.handle(), kvzc.RemoteHandle.from_bytes(region.handle().to_bytes())
        for _ in range(depth):
            greedy.put(ONES, handle, notify=b"greedy").wait()
        until(lambda: owner.stats()["arrivals_pending"] == depth or owner.arrivals.poll(0))
        with pytest.raises(kvzc.WouldBlock, match="inbox"):
            greedy.put(ONES, handle, notify=b"greedy", accept_timeout=0)
        for _ in range(depth):
            other.put(ONES * 2, again, notify=b"other", accept_timeout=0).wait()
        with pytest.raises(kvzc.WouldBlock, match="inbox"):
            other.put(ONES, again, notify=b"other", accept_timeout=0)
        taken = owner.arrivals.wait(b"other", depth, timeout=10)
        assert {arrival.peer.name for arrival in taken} == {other.name}
        # The room that they leave is the other's, not the greedy one's.
        with pytest.raises(kvzc.WouldBlock, match="inbox"):
            greedy.put(ONES, handle, notify=b"greedy", accept_timeout=0)
        other.put(ONES, again, notify=b"other", accept_timeout=10).wait()
        assert len(owner.arrivals.wait(b"greedy", depth, timeout=10)) == depth


@pytest.mark.parametrize("make", [kvzc.Engine, kvzc.default_engine], ids=["Engine", "default"])
def test_an_inbox_holds_65536_tags_of_a_peer_unless_told_otherwise(make: Any) -> None:
    with make() as engine, engine.register(kvzc.empty(8, "uint8")) as region:
        handle = region.handle()
        engine.connect(handle)
        for _ in range(65536):
            engine.notify(handle, b"t")
        with pytest.raises(kvzc.WouldBlock, match="holds 65536 tags of ours"):
            engine.notify(handle, b"t", accept_timeout=0)
        assert len(engine.arrivals.wait(b"t", 65536)) == 65536
        engine.notify(handle, b"t").wait()


# ---- tags ----


@pytest.mark.parametrize("tag", [b"", b"\0", b"a\0b", bytes(range(240)), b"\xff" * 240], ids=len)
def test_tags_are_any_bytes_up_to_240(inbox: Inbox, tag: bytes) -> None:
    inbox.send(tag, tag, tag)
    assert inbox.arrivals.wait(tag).tag == tag
    assert inbox.poll(1) == [tag]
    inbox.arrivals.forget(tag)
    assert inbox.poll() == []


@pytest.mark.parametrize("nbytes", [241, 255, 256, 257, 496, 100_000])
def test_a_longer_tag_is_refused_everywhere(inbox: Inbox, nbytes: int) -> None:
    tag = b"x" * nbytes
    with pytest.raises(kvzc.InvalidArgument, match="240"):
        inbox.send(tag)
    with pytest.raises(kvzc.InvalidArgument, match="240"):
        inbox.arrivals.wait(tag, timeout=0)
    assert inbox.poll() == []


def test_tags_are_bytes(inbox: Inbox) -> None:
    for wrong in ("text", 5, None):
        with pytest.raises(TypeError):
            inbox.arrivals.wait(wrong, timeout=0)  # type: ignore[call-overload]
        with pytest.raises(TypeError):
            inbox.arrivals.forget(wrong)  # type: ignore[arg-type]


# ---- failed transfers ----


def test_a_transfer_that_fails_halfway_tells_both_sides(engine: kvzc.Engine, peer: Peer) -> None:
    """The owner closes the region while a writer writes."""
    nbytes = 64 * MIB
    cache = kvzc.empty(nbytes, "uint8")
    with engine.register(cache) as region, engine.register(kvzc.empty(8, "uint8")) as other:
        peer.call(writer_start, other.handle().to_text())
        peer.call(writer_start, region.handle().to_text())
        peer.start(writer_try, nbytes, b"t")
        assert engine.arrivals.wait(b"t").error is None
        region.close()
        cache[:] = 1
        assert peer.result() == "Revoked"
        time.sleep(0.02)
        assert (cache == 1).all()  # The fence holds: nothing after close() returned.


def test_the_tag_of_a_failed_transfer_carries_the_error(engine: kvzc.Engine) -> None:
    nbytes = 96 * MIB
    cache = kvzc.empty(nbytes, "uint8")
    source = np.ones(nbytes, np.uint8)
    with kvzc.Engine(default_timeout=20) as writer:
        for _ in range(10):
            region = engine.register(cache)
            handle = region.handle()
            writer.connect(handle)
            transfer = writer.put(source, handle, notify=b"t")
            region.close()
            arrival = engine.arrivals.wait(b"t")
            if transfer.error is None and arrival.error is None:
                continue  # It was faster.
            assert isinstance(arrival.error, kvzc.Revoked)
            assert "Revoked" in repr(arrival)
            assert "not whole" in str(arrival.error)
            with pytest.raises(kvzc.Revoked):
                transfer.wait()
            return
    pytest.fail("the region was never closed in mid-transfer")


def test_the_tag_of_a_transfer_that_is_cancelled_before_the_connection_stands_arrives(
    engine: kvzc.Engine,
) -> None:
    """COMP-02: who counts tags must learn of every transfer that was accepted."""
    with engine.register(kvzc.empty(8, "uint8")) as region:
        cancelled = 0
        for _ in range(20):
            with kvzc.Engine() as writer:
                transfer = writer.put(ONES, region.handle(), notify=b"t")
                transfer.cancel()
                cancelled += transfer.error is not None
                writer.put(ONES, region.handle(), notify=b"end").wait()
                engine.arrivals.wait(b"end")
                arrival = engine.arrivals.wait(b"t", timeout=1)
                assert (arrival.error is None) == (transfer.error is None)
        assert cancelled > 0


# ---- descriptors and event loops ----


def readable(inbox: Inbox, seconds: float = 0) -> bool:
    by_select = bool(select.select([inbox.arrivals.fileno()], [], [], seconds)[0])
    poller = select.poll()
    poller.register(inbox.arrivals.fileno(), select.POLLIN)
    assert bool(poller.poll(0)) == by_select
    return by_select


def test_the_descriptor_is_readable_when_there_is_something(inbox: Inbox) -> None:
    inbox.send(b"before")
    assert readable(inbox, 2)
    assert inbox.poll() == [b"before"]
    inbox.poll()
    assert not readable(inbox)
    timer = threading.Timer(0.2, inbox.send, [b"later", b"later"])
    timer.start()
    assert readable(inbox, 5)
    timer.join()
    until(lambda: inbox.poll(1) == [b"later"])
    assert readable(inbox)  # One is left.
    until(lambda: inbox.poll(1) == [b"later"])
    inbox.poll()
    assert not readable(inbox)
    assert inbox.arrivals.fileno() == inbox.arrivals.fileno()


async def take(arrivals: Any, count: int) -> list[bytes]:
    out: list[bytes] = []
    async for arrival in arrivals:
        out.append(arrival.tag)
        if len(out) == count:
            return out
    return out


def test_an_event_loop_gets_every_arrival_and_keeps_running(inbox: Inbox) -> None:
    async def main() -> tuple[list[bytes], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticker = asyncio.create_task(tick())
        loop = asyncio.get_running_loop()
        loop.call_later(0.3, lambda: None)
        sender = loop.run_in_executor(
            None, lambda: (time.sleep(0.3), inbox.send(*[b"%d" % i for i in range(200)]))
        )
        got = await asyncio.wait_for(take(inbox.arrivals, 200), 20)
        await sender
        ticker.cancel()
        return got, ticks

    got, ticks = asyncio.run(main())
    assert got == [b"%d" % i for i in range(200)]
    assert ticks > 10


def test_leaving_an_iteration_loses_no_arrival(inbox: Inbox) -> None:
    inbox.send(*[b"%d" % i for i in range(10)])

    async def main() -> list[bytes]:
        return await take(inbox.arrivals, 3) + await take(inbox.arrivals, 4)

    assert asyncio.run(asyncio.wait_for(main(), 5)) == [b"%d" % i for i in range(7)]
    assert inbox.poll() == [b"7", b"8", b"9"]


def test_two_iterations_share_the_arrivals(inbox: Inbox) -> None:
    async def main() -> list[bytes]:
        got: list[bytes] = []

        async def consume() -> None:
            async for arrival in inbox.arrivals:
                got.append(arrival.tag)
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(consume()) for _ in range(2)]
        await asyncio.sleep(0.05)
        loop = asyncio.get_running_loop()
        for i in range(5):
            tags = [b"%d" % j for j in range(20 * i, 20 * i + 20)]
            await loop.run_in_executor(None, lambda tags=tags: inbox.send(*tags))
            await asyncio.sleep(0.02)
        for _ in range(500):
            if len(got) == 100:
                break
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return got

    assert sorted(asyncio.run(main()), key=int) == [b"%d" % i for i in range(100)]


def test_a_cancelled_iteration_leaves_no_descriptor(inbox: Inbox) -> None:
    inbox.arrivals.fileno()

    async def main() -> None:
        before = open_files()
        for _ in range(10):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(take(inbox.arrivals, 1), 0.01)
        assert open_files() == before

    asyncio.run(main())
    inbox.send(b"after")
    assert inbox.poll() == [b"after"]


def test_an_iteration_ends_when_its_engine_closes() -> None:
    async def main() -> None:
        engine = kvzc.Engine()
        task = asyncio.create_task(take(engine.arrivals, 1))
        await asyncio.sleep(0.05)
        await asyncio.get_running_loop().run_in_executor(None, engine.close)
        with pytest.raises(kvzc.Closed):
            await asyncio.wait_for(task, 10)

    asyncio.run(main())


def test_a_wait_ends_when_its_engine_closes() -> None:
    engine = kvzc.Engine()
    threading.Timer(0.2, engine.close).start()
    start = time.monotonic()
    with pytest.raises(kvzc.Closed):
        engine.arrivals.wait(b"never", timeout=20)
    assert time.monotonic() - start < 5


DEFAULT = """
import kvzc
import numpy as np
arrivals = kvzc.arrivals
def once():
    cache = kvzc.empty(8, "uint8")
    with kvzc.register(cache) as region:
        kvzc.put(np.ones(8, np.uint8), region.handle(), notify=b"t").wait()
        assert arrivals.wait(b"t", timeout=5).error is None
once()
first = kvzc.default_engine()
first.close()
once()
assert kvzc.default_engine() is not first
try:
    first.arrivals.poll()
except kvzc.Closed:
    pass
else:
    raise SystemExit("the arrivals of the closed engine gave something")
"""


def test_the_default_arrivals_follow_the_default_engine() -> None:
    ended = run_script(DEFAULT)
    assert ended.status == 0, ended.errors
