"""Completion queues, and transfers on an event loop."""

import asyncio
import gc
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import kvzc
import numpy as np
import pytest
from helpers import Peer, State, stop, until
from kvzc._aio import _Ends, _ends


@pytest.fixture
def engines() -> Iterator[tuple[kvzc.Engine, kvzc.Engine]]:
    with kvzc.Engine() as owner, kvzc.Engine() as writer:
        yield owner, writer


def row_bytes(engine: kvzc.Engine, rows: int, nbytes: int) -> Any:
    return engine.empty((rows, nbytes), "uint8")


def test_gives_each_transfer_back_once_with_its_label(
    engines: tuple[kvzc.Engine, kvzc.Engine],
) -> None:
    owner, writer = engines
    source, target = row_bytes(writer, 50, 4096), row_bytes(owner, 50, 4096)
    source[:] = np.arange(50, dtype=np.uint8)[:, None]
    with owner.register(target) as region, kvzc.CompletionQueue() as queue:
        handle = region.handle()
        started = {
            writer.put(source[i], handle[i], queue=queue, label=("row", i)) for i in range(50)
        }
        ended: list[kvzc.Transfer] = []
        while len(ended) < 50:
            ended += queue.wait(20)
        assert sorted(each.label[1] for each in ended) == list(range(50))
        assert all(each.done and each.error is None for each in ended)
        assert set(ended) == started  # The same transfers, whoever gave them.
        assert queue.poll() == []
        assert (queue.running, queue.ended) == (0, 0)
        assert (target == source).all()


def test_ends_come_in_order_and_never_more_than_asked(
    engines: tuple[kvzc.Engine, kvzc.Engine],
) -> None:
    owner, writer = engines
    with owner.register(row_bytes(owner, 1, 64)) as region, kvzc.CompletionQueue() as queue:
        for i in range(10):  # Small ones end before put() returns.
            writer.put(np.zeros((1, 64), np.uint8), region.handle(), queue=queue, label=i).wait(20)
        assert queue.ended == 10
        assert [each.label for each in queue.poll(3)] == [0, 1, 2]
        assert [each.label for each in queue.wait(20, max=4)] == [3, 4, 5, 6]
        assert [each.label for each in queue.poll(100)] == [7, 8, 9]


def test_a_failed_transfer_is_an_entry_and_not_an_exception(
    engines: tuple[kvzc.Engine, kvzc.Engine],
) -> None:
    owner, writer = engines
    with owner.register(row_bytes(owner, 2, 64)) as region, kvzc.CompletionQueue() as queue:
        grant = region[0].grant(access="put")
        handle = grant.handle()
        writer.connect(handle)
        grant.revoke(timeout=20)
        writer.put(np.zeros(64, np.uint8), handle, queue=queue, label="late")
        (transfer,) = queue.wait(20)
        assert isinstance(transfer.error, kvzc.Revoked)
        assert transfer.label == "late"


def test_waits_time_out_and_close_ends_them(engines: tuple[kvzc.Engine, kvzc.Engine]) -> None:
    queue = kvzc.CompletionQueue()
    begun = time.monotonic()
    with pytest.raises(kvzc.TimedOut, match=r"0 run on"):
        queue.wait(0.05)
    assert time.monotonic() - begun < 5
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            queue.wait(20)
        except kvzc.Error as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    queue.close()
    queue.close()
    thread.join(10)
    assert [type(each) for each in caught] == [kvzc.Closed]
    assert queue.closed
    for call in (queue.poll, queue.wait, queue.fileno):
        with pytest.raises(kvzc.Closed):
            call()
    owner, writer = engines
    with owner.register(row_bytes(owner, 1, 8)) as region, pytest.raises(kvzc.Closed):
        writer.put(np.zeros((1, 8), np.uint8), region.handle(), queue=queue)


def test_a_full_queue_pushes_back_and_posts_nothing(
    engines: tuple[kvzc.Engine, kvzc.Engine],
) -> None:
    owner, writer = engines
    target = row_bytes(owner, 3, 8)
    ones = np.ones(8, np.uint8)
    with owner.register(target) as region, kvzc.CompletionQueue(2) as queue:
        handle = region.handle()
        writer.put(ones, handle[0], queue=queue)
        writer.put(ones, handle[1], queue=queue).wait(20)
        with pytest.raises(kvzc.WouldBlock, match=r"completion queue is full.*depth of 2"):
            writer.put(ones, handle[2], queue=queue, accept_timeout=0)
        with pytest.raises(kvzc.TimedOut, match=r"nothing was posted: the completion queue"):
            writer.put(ones, handle[2], queue=queue, accept_timeout=0.05)
        assert not target[2].any()
        taker = threading.Timer(0.1, queue.poll, [1])
        taker.start()
        writer.put(ones, handle[2], queue=queue, accept_timeout=20).wait(20)
        assert target[2].all()
        # A call that is refused gives its place back.
        queue.poll()
        for _ in range(5):
            with pytest.raises(kvzc.LayoutMismatch):
                writer.put(ones, handle, queue=queue)
        writer.put(ones, handle[0], queue=queue)
        with pytest.raises(ValueError, match=r"at least one"):
            kvzc.CompletionQueue(0)


def test_its_descriptor_is_readable_while_there_is_an_entry(
    engines: tuple[kvzc.Engine, kvzc.Engine],
) -> None:
    owner, writer = engines
    source, target = row_bytes(writer, 1, 8 << 20), row_bytes(owner, 1, 8 << 20)
    with owner.register(target) as region, kvzc.CompletionQueue() as queue:

        def is_readable(seconds: float) -> bool:
            return bool(select.select([queue.fileno()], [], [], seconds)[0])

        assert not is_readable(0)
        for _ in range(2):
            writer.put(source, region.handle(), queue=queue)
        assert is_readable(20)
        taken = len(queue.poll(1))
        until(lambda: queue.ended == 2 - taken, 20)
        assert is_readable(0)
        queue.poll()
        assert not is_readable(0)
        writer.put(source[:, :8], region.handle()[:, :8], queue=queue)
        empty = kvzc.CompletionQueue()
        with pytest.raises(BlockingIOError):
            os.read(empty.fileno(), 8)  # It never blocks a loop.
        assert is_readable(20)


def test_dropping_a_queue_leaves_its_transfers_running(
    engines: tuple[kvzc.Engine, kvzc.Engine],
) -> None:
    owner, writer = engines
    source, target = row_bytes(writer, 8, 4 << 20), row_bytes(owner, 8, 4 << 20)
    source[:] = 7
    with owner.register(target) as region:
        queue = kvzc.CompletionQueue()
        running = [writer.put(source[i], region.handle()[i], queue=queue) for i in range(8)]
        del queue
        kvzc.wait(running, 20)
        assert (target == 7).all()


def test_one_queue_serves_engines_and_threads(engines: tuple[kvzc.Engine, kvzc.Engine]) -> None:
    owner, writer = engines
    threads, each = 6, 200
    target = row_bytes(owner, threads, 256)
    seen: list[Any] = []
    with (
        owner.register(target) as region,
        kvzc.Engine() as other,
        kvzc.CompletionQueue(64) as queue,
    ):
        handle = region.handle()

        def put(number: int) -> None:
            engine = writer if number % 2 else other
            for i in range(each):
                engine.put(np.zeros(256, np.uint8), handle[number], queue=queue, label=(number, i))

        def take() -> None:
            while len(seen) < threads * each:
                try:
                    seen.extend(entry.label for entry in queue.wait(0.2))
                except kvzc.TimedOut:
                    continue

        running = [threading.Thread(target=put, args=(i,)) for i in range(threads)]
        running += [threading.Thread(target=take) for _ in range(2)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(60)
            assert not thread.is_alive()
        assert sorted(seen) == [(i, j) for i in range(threads) for j in range(each)]


def test_an_engine_waits_as_the_module_does(engines: tuple[kvzc.Engine, kvzc.Engine]) -> None:
    owner, writer = engines
    with owner.register(row_bytes(owner, 2, 64)) as region:
        running = [writer.put(np.zeros(64, np.uint8), region.handle()[i]) for i in range(2)]
        assert writer.wait(running, 20) == running
        assert writer.wait(running, 20, "first")
        running[0].wait_on(None)  # Nothing, on CPU memory.
        with pytest.raises(ValueError, match="'all' or 'first'"):
            writer.wait(running, 20, "some")


# --- On an event loop ---


def test_await_gives_done_or_the_error(engines: tuple[kvzc.Engine, kvzc.Engine]) -> None:
    owner, writer = engines
    source, target = row_bytes(writer, 40, 1 << 20), row_bytes(owner, 40, 1 << 20)
    source[:] = 9
    with owner.register(target) as region:
        handle = region.handle()
        grant = region[0].grant(access="put")
        revoked = grant.handle()
        writer.connect(revoked)
        grant.revoke(timeout=20)

        async def main() -> None:
            await asyncio.gather(*(writer.put(source[i], handle[i]) for i in range(40)))
            await writer.put(source[0, :8], handle[0, :8])  # Done before it is awaited.
            with pytest.raises(kvzc.Revoked):
                await writer.put(source[0], revoked)

        # Two loops, one after the other.
        asyncio.run(asyncio.wait_for(main(), 60))
        asyncio.run(asyncio.wait_for(main(), 60))
        assert (target == 9).all()


def test_the_loop_runs_on_while_a_transfer_does(engines: tuple[kvzc.Engine, kvzc.Engine]) -> None:
    owner, writer = engines
    nbytes = 256 << 20
    source, target = row_bytes(writer, 1, nbytes), row_bytes(owner, 1, nbytes)
    beats = 0

    async def main(handle: kvzc.RemoteHandle) -> None:
        nonlocal beats
        transfer = writer.put(source, handle)
        task = asyncio.ensure_future(transfer)
        while not task.done():
            beats += 1
            await asyncio.sleep(0)
        await task

    with owner.register(target) as region:
        asyncio.run(asyncio.wait_for(main(region.handle()), 60))
    assert beats > 10  # Bare turns of the loop; a loop that is held up has one or two.


def test_a_cancelled_task_leaves_the_transfer_running(
    engines: tuple[kvzc.Engine, kvzc.Engine],
) -> None:
    owner, writer = engines
    source, target = row_bytes(writer, 1, 64 << 20), row_bytes(owner, 1, 64 << 20)
    source[:] = 3

    async def main(handle: kvzc.RemoteHandle) -> None:
        transfer = writer.put(source, handle)
        task = asyncio.ensure_future(transfer)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await transfer  # Again.

    with owner.register(target) as region:
        asyncio.run(asyncio.wait_for(main(region.handle()), 60))
        assert (target == 3).all()


def test_iterating_a_queue(engines: tuple[kvzc.Engine, kvzc.Engine]) -> None:
    owner, writer = engines
    with owner.register(row_bytes(owner, 8, 64)) as region, kvzc.CompletionQueue() as queue:

        async def main() -> list[int]:
            for i in range(8):
                writer.put(np.zeros(64, np.uint8), region.handle()[i], queue=queue, label=i)
            seen: list[int] = []
            async for transfer in queue:
                seen.append(transfer.label)
                if len(seen) == 8:
                    asyncio.get_running_loop().call_soon(queue.close)
            return seen

        with pytest.raises(kvzc.Closed):
            asyncio.run(asyncio.wait_for(main(), 60))


def own(state: State, nbytes: int) -> str:
    state.engine = kvzc.Engine()
    state.memory = state.engine.empty((nbytes,), "uint8")
    state.region = state.engine.register(state.memory)
    text: str = state.region.handle().to_text()
    return text


def test_await_hears_of_a_lost_peer() -> None:
    """The peer's process is stopped before the connection, and then killed."""

    async def main(writer: kvzc.Engine, owner: Peer, handle: kvzc.RemoteHandle) -> None:
        transfer = writer.put(np.zeros(64, np.uint8), handle)
        asyncio.get_running_loop().call_later(0.2, owner.signal, signal.SIGKILL)
        with pytest.raises(kvzc.PeerLost):
            await transfer

    with Peer() as owner, kvzc.Engine() as writer:
        handle = kvzc.RemoteHandle.from_text(owner.call(own, 64))
        stop(owner)
        asyncio.run(asyncio.wait_for(main(writer, owner, handle), 10))


def test_await_does_not_wait_for_quiet_when_the_peer_is_lost(
    engines: tuple[kvzc.Engine, kvzc.Engine],
) -> None:
    """As wait(): who waits hears of the loss, while memory stays kept until the end."""

    class Lost:
        _lost = kvzc.PeerLost("gone")

    async def main(transfer: kvzc.Transfer) -> None:
        ends = _Ends(asyncio.get_running_loop())
        task = asyncio.ensure_future(ends.wait(transfer))
        await asyncio.sleep(0.02)
        ends._waiting[Lost()] = ends._waiting[transfer]  # type: ignore[index]
        with pytest.raises(kvzc.PeerLost, match="gone"):
            await task
        assert not transfer.quiet

    owner, _ = engines
    with (
        owner.register(row_bytes(owner, 1, 64)) as region,
        kvzc.Engine(faults=kvzc.Faults(completion_loss=1.0)) as writer,
    ):
        transfer = writer.put(np.zeros((1, 64), np.uint8), region.handle())
        asyncio.run(asyncio.wait_for(main(transfer), 10))
        transfer.cancel(10)


def test_a_transfer_is_watched_once_however_often_it_is_awaited(
    engines: tuple[kvzc.Engine, kvzc.Engine],
) -> None:
    async def main(transfer: kvzc.Transfer) -> None:
        for _ in range(20):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(transfer, 0.001)
        ends = _ends[asyncio.get_running_loop()]
        assert ends._queue.running == 1
        assert list(ends._waiting.values()) == [set()]

    owner, _ = engines
    with (
        owner.register(row_bytes(owner, 1, 64)) as region,
        kvzc.Engine(faults=kvzc.Faults(completion_loss=1.0)) as writer,
    ):
        transfer = writer.put(np.zeros((1, 64), np.uint8), region.handle())
        for _ in range(5):
            asyncio.run(asyncio.wait_for(main(transfer), 20))
        gc.collect()
        assert len(_ends) <= 1  # Loops that are gone take theirs along.
        transfer.cancel(10)
        asyncio.run(ended(transfer))


async def ended(transfer: kvzc.Transfer) -> None:
    with pytest.raises(kvzc.Cancelled):
        await transfer


def test_a_forked_child_awaits_nothing(engines: tuple[kvzc.Engine, kvzc.Engine]) -> None:
    owner, _ = engines
    with (
        owner.register(row_bytes(owner, 1, 64)) as region,
        kvzc.Engine(faults=kvzc.Faults(completion_loss=1.0)) as writer,
        kvzc.CompletionQueue() as queue,
    ):
        transfer = writer.put(np.zeros((1, 64), np.uint8), region.handle(), queue=queue)

        async def main() -> None:
            await transfer

        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                asyncio.run(asyncio.wait_for(main(), 5))
            except kvzc.ForkedEngine:
                code = 0 if (queue.closed, queue.running) == (True, 0) else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        transfer.cancel(10)


def test_a_forked_child_is_told(engines: tuple[kvzc.Engine, kvzc.Engine]) -> None:
    queue = kvzc.CompletionQueue()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            queue.poll()
        except kvzc.ForkedEngine:
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
