"""What a call costs from Python, and how long an event loop is held up.

``python bench/python/python_cost.py [--seconds S] [--json]``. The owner is another process. Each
row is a median over many calls; compare rows of one run only.

    put 64 B          put + wait of prepared views, 64 bytes
    index             handle[layer, ids], 1,000 ids
    plan start        plan.put of 1,000 blocks of 64 bytes: until it returns, copy included
    plan floor        the same blocks by NumPy: target[ids] = source[ids2], within this process
    await 64 B        the same put, awaited
    loop stall        the longest gap between two turns of a loop that does nothing else, while
                      1 GiB is put and awaited; beside the longest gap without a put
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

import kvzc
import numpy as np

BLOCKS, BLOCK_BYTES, IDS = 4096, 64, 1000
LARGE = 1 << 30


def own(pipe: Connection) -> None:
    """The other process: memory, and nothing else."""
    with kvzc.Engine() as engine:
        cache = {f"layer.{i}": engine.empty((BLOCKS, BLOCK_BYTES), "uint8") for i in range(4)}
        region = engine.register(cache)
        large = engine.register(engine.empty((LARGE,), "uint8"))
        pipe.send((region.handle().to_text(), large.handle().to_text()))
        pipe.recv()


def measure(call: Callable[[], object], seconds: float) -> float:
    """Median in microseconds."""
    for _ in range(20):
        call()
    took = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        begun = time.perf_counter_ns()
        call()
        took.append(time.perf_counter_ns() - begun)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="per row")
    parser.add_argument("--json", action="store_true", help="lines instead of a table")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    owner = context.Process(target=own, args=(theirs,), daemon=True)
    owner.start()
    handle, large = (kvzc.RemoteHandle.from_text(text) for text in pipe.recv())

    rows: dict[str, tuple[float, str]] = {}
    rng = np.random.default_rng(0)
    with kvzc.Engine() as engine:
        own_cache = {f"layer.{i}": engine.empty((BLOCKS, BLOCK_BYTES), "uint8") for i in range(4)}
        local = engine.register(own_cache)
        engine.connect(handle)
        engine.connect(large)
        source, target = local["layer.0", 0], handle["layer.0", 1]
        rows["put 64 B"] = measure(lambda: engine.put(source, target).wait(), options.seconds), "us"
        ids, other = (rng.permutation(BLOCKS)[:IDS] for _ in range(2))
        rows["index"] = measure(lambda: handle["layer.0", ids], options.seconds), "us"
        plan = engine.plan(local, handle)
        rows["plan start"] = (
            measure(lambda: plan.put(ids, other, layers=0).wait(), options.seconds),
            "us",
        )
        here, there = own_cache["layer.0"], np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)

        def by_numpy() -> None:
            there[other] = here[ids]

        rows["plan floor"] = measure(by_numpy, options.seconds), "us"

        async def awaited() -> float:
            took = []
            until = time.perf_counter() + options.seconds
            while time.perf_counter() < until:
                begun = time.perf_counter_ns()
                await engine.put(source, target)
                took.append(time.perf_counter_ns() - begun)
            return statistics.median(took) / 1e3

        rows["await 64 B"] = asyncio.run(awaited()), "us"
        gigabyte = engine.register(engine.empty((LARGE,), "uint8"))

        async def put_it() -> None:
            await engine.put(gigabyte, large)

        rows["loop stall"] = asyncio.run(longest_gap(put_it())), "ms"
        rows["loop stall, idle"] = asyncio.run(longest_gap(asyncio.sleep(0.3))), "ms"
    pipe.send(None)
    owner.join(20)
    for name, (value, unit) in rows.items():
        if options.json:
            print(json.dumps({"row": name, "value": value, "unit": unit}))
        else:
            print(f"{name:20} {value:10.2f} {unit}", file=sys.stderr)


if __name__ == "__main__":
    main()
