"""What a call costs from Python, and how long an event loop is held up.

``python bench/python/python_cost.py [--seconds S] [--json]``. The owner is another process. Each
row is a median over many calls; compare rows of one run only. Payloads are random, and blocks are
compared by the owner outside the timed window.

    put 64 B          put + wait of prepared views, 64 bytes
    index             handle[layer, ids], 1,000 ids
    plan start        plan.put of 1,000 blocks of 64 bytes: until it returns, copy included
    plan floor        the same blocks by NumPy: target[ids] = source[ids2], within this process
    plan handed over  plan.put of 1,000 blocks of 4 KiB: until it returns, and copy threads copy
    ..., cpu          the same in processor time of the calling thread: without the times that a
                      copy thread took its core
    plan until copied plan.put of 1,000 blocks of 4 KiB: from the call until the first byte is
                      copied, as the engine's trace says
    plan 1 B          plan.put of 1,000 blocks of 1 byte: until it returns, copy included
    4096 x 32 KiB     blocks, random to random: index both sides, put, wait, in one call
    32768 x 4 KiB     the same bytes in smaller blocks
    ... by NumPy      the same blocks by one thread of NumPy, which gathers, then scatters, within
                      this process; not the floor of the C++ benches, which is a loop of memcpy
    put + notify      8 bytes and a tag until the other process, which looks all the time, has
                      seen it: half of a round trip, each process on a core of its own
    await 64 B        the same put, awaited
    loop stall        the longest gap between two turns of a loop that does nothing else, while
                      1 GiB is put and awaited; beside the longest gap without a put
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import kvzc
import numpy as np

BLOCKS, BLOCK_BYTES, IDS = 4096, 64, 1000
LARGE = 1 << 30
SCATTERED = {"4096 x 32 KiB": (4096, 32 << 10), "32768 x 4 KiB": (32768, 4 << 10)}
PING, PINGS = b"ping", 100


@dataclass
class Row:
    row: str
    value: float
    unit: str
    goal: float | None = None  # At most this, in the same unit.


def large_views(large: np.ndarray) -> dict[str, np.ndarray]:
    """One large array, flat and as blocks: twice as many as are put."""
    views = {"flat": large}
    for name, (count, nbytes) in SCATTERED.items():
        views[name] = large[: 2 * count * nbytes].reshape(2 * count, nbytes)
    return views


def own(pipe: Connection) -> None:
    """The other process: memory, and nothing else."""
    with kvzc.Engine() as engine:
        cache = {f"layer.{i}": engine.empty((BLOCKS, BLOCK_BYTES), "uint8") for i in range(4)}
        views = large_views(engine.empty((LARGE,), "uint8"))
        regions = [engine.register(group) for group in (cache, views)]
        pipe.send([region.handle().to_text() for region in regions])
        for name, ids in iter(pipe.recv, None):
            pipe.send(zlib.crc32(views[name][ids]))


def keep_to_core(nth: int) -> None:
    """Of this thread, and those that it starts; where there are two cores."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[nth]})


class Player:
    """One side of a ping-pong: 8 bytes and a tag, into the other side's memory."""

    def __init__(self, engine: kvzc.Engine, pipe: Connection) -> None:
        self.engine = engine
        self.memory = engine.empty((2, 8), "uint8")
        self.region = engine.register(self.memory)
        pipe.send(self.region.handle().to_text())
        self.target = kvzc.RemoteHandle.from_text(pipe.recv())[0]
        self.received, self.to_send = self.region[0], self.region[1]
        engine.connect(self.target)
        pipe.send(None)
        pipe.recv()

    def serve(self) -> None:
        self.engine.put(self.to_send, self.target, notify=PING)
        self.engine.arrivals.wait(PING)

    def answer(self) -> None:
        """Sends back what came in."""
        self.engine.arrivals.wait(PING)
        self.engine.put(self.received, self.target, notify=PING)


def echo(pipe: Connection) -> None:
    keep_to_core(1)
    with kvzc.Engine() as engine:
        player = Player(engine, pipe)
        for count in iter(pipe.recv, None):
            for _ in range(count):
                player.answer()


def ping_pong(context: multiprocessing.context.SpawnContext, seconds: float) -> float:
    """Microseconds, one way."""
    pipe, theirs = context.Pipe()
    other = context.Process(target=echo, args=(theirs,), daemon=True)
    other.start()
    before = os.sched_getaffinity(0)
    keep_to_core(0)
    rng = np.random.default_rng(1)
    with kvzc.Engine() as engine:
        player = Player(engine, pipe)
        took = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            player.memory[1] = rng.integers(256, size=8)
            pipe.send(PINGS + 1)
            player.serve()  # The other process is at it from here on.
            begun = time.perf_counter_ns()
            for _ in range(PINGS):
                player.serve()
            took.append((time.perf_counter_ns() - begun) / (2 * PINGS))
            assert (player.memory[0] == player.memory[1]).all()
        pipe.send(None)
        other.join(20)
    os.sched_setaffinity(0, before)
    return statistics.median(took) / 1e3


def measure(
    call: Callable[[], object],
    seconds: float,
    *,
    repeats: int = 1,
    clock: Callable[[], int] = time.perf_counter_ns,
    after: Callable[[object], object] = lambda result: None,
) -> float:
    """Median in microseconds; `call` does it `repeats` times, `after` is not timed."""
    for _ in range(5):
        after(call())
    took = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(took) < 5:
        begun = clock()
        result = call()
        took.append((clock() - begun) / repeats)
        after(result)
    return statistics.median(took) / 1e3


async def longest_gap(work: Awaitable[object]) -> float:
    """Milliseconds."""
    task = asyncio.ensure_future(work)
    longest, last = 0.0, time.perf_counter()
    while not task.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    await task
    return longest * 1e3


def until_copied(large: kvzc.RemoteHandle, blocks: str, seconds: float) -> float:
    """Microseconds from the call of plan.put until the first byte is copied, by the trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        begun = []
        with kvzc.Engine(trace=path) as engine:
            rng = np.random.default_rng(2)
            ids, other = (rng.permutation(BLOCKS)[:IDS] for _ in range(2))
            local = engine.register(large_views(engine.empty((LARGE,), "uint8")))
            engine.connect(large)
            plan = engine.plan(local[blocks], large[blocks])
            until = time.perf_counter() + seconds
            while time.perf_counter() < until or len(begun) < 5:
                begun.append(time.monotonic_ns())
                plan.put(ids, other, label="put").wait()
        slices = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    # Those of the connection come before.
    copies = [each["ts"] for each in slices if each["name"] == "copy"][-len(begun) :]
    return statistics.median(
        at - call / 1e3 for at, call in zip(copies[5:], begun[5:], strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="per row")
    parser.add_argument("--json", action="store_true", help="lines instead of a table")
    options = parser.parse_args()
    seconds = options.seconds
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    owner = context.Process(target=own, args=(theirs,), daemon=True)
    owner.start()
    handle, large = (kvzc.RemoteHandle.from_text(text) for text in pipe.recv())

    rows = []

    def add(row: str, value: float, unit: str = "us", goal: float | None = None) -> None:
        rows.append(Row(row, value, unit, goal))

    rng = np.random.default_rng(0)
    with kvzc.Engine() as engine:
        own_cache = {f"layer.{i}": engine.empty((BLOCKS, BLOCK_BYTES), "uint8") for i in range(4)}
        local = engine.register(own_cache)
        engine.connect(handle)
        engine.connect(large)
        source, target = local["layer.0", 0], handle["layer.0", 1]

        def hundred_puts() -> None:
            for _ in range(100):
                engine.put(source, target).wait()

        add("put 64 B", measure(hundred_puts, seconds, repeats=100), goal=1.0)
        ids, other = (rng.permutation(BLOCKS)[:IDS] for _ in range(2))
        add("index", measure(lambda: handle["layer.0", ids], seconds), goal=60)
        plan = engine.plan(local, handle)
        add("plan start", measure(lambda: plan.put(ids, other, layers=0).wait(), seconds))
        here, there = own_cache["layer.0"], np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)

        def by_numpy() -> None:
            there[other] = here[ids]

        add("plan floor", measure(by_numpy, seconds))

        views = large_views(engine.empty((LARGE,), "uint8"))
        views["flat"].view(np.uint64)[:] = rng.integers(1 << 64, size=LARGE // 8, dtype=np.uint64)
        local_large = engine.register(views)
        blocks = "32768 x 4 KiB"
        # Too many bytes for the caller to copy: put returns when others have them to copy.
        four_kib = engine.plan(local_large[blocks], large[blocks])
        for name, clock in {"": time.perf_counter_ns, ", cpu": time.thread_time_ns}.items():
            took = measure(
                lambda: four_kib.put(ids, other), seconds, clock=clock, after=lambda put: put.wait()
            )
            add(f"plan handed over{name}", took)
        add("plan until copied", until_copied(large, blocks, seconds), goal=10)
        one_byte = engine.plan(local_large[blocks, :, :1], large[blocks, :, :1])
        add("plan 1 B", measure(lambda: one_byte.put(ids, other).wait(), seconds))

        def put_blocks() -> None:
            engine.put(local_large[blocks, ids], large[blocks, other]).wait()

        floor_memory = large_views(np.zeros(LARGE, np.uint8))
        for blocks, (count, _) in SCATTERED.items():
            ids, other = (rng.permutation(2 * count)[:count] for _ in range(2))
            here, there = views[blocks], floor_memory[blocks]
            add(blocks, measure(put_blocks, seconds))
            add(f"{blocks} by NumPy", measure(by_numpy, seconds))
            pipe.send((blocks, other))
            assert pipe.recv() == zlib.crc32(here[ids])

        add("put + notify", ping_pong(context, seconds), goal=2.0)

        async def awaited() -> float:
            took = []
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                begun = time.perf_counter_ns()
                await engine.put(source, target)
                took.append(time.perf_counter_ns() - begun)
            return statistics.median(took) / 1e3

        add("await 64 B", asyncio.run(awaited()))

        async def put_it() -> None:
            await engine.put(local_large["flat"], large["flat"])

        add("loop stall", asyncio.run(longest_gap(put_it())), "ms")
        add("loop stall, idle", asyncio.run(longest_gap(asyncio.sleep(0.3))), "ms")
    pipe.send(None)
    owner.join(20)
    for row in rows:
        if options.json:
            print(json.dumps({key: each for key, each in asdict(row).items() if each is not None}))
        else:
            text = f"{row.row:24} {row.value:12.2f} {row.unit}"
            if row.goal is not None:
                text += f"  <= {row.goal:<4g} {'met' if row.value <= row.goal else 'missed'}"
            print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
