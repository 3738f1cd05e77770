"""Transfers and arrivals on an event loop.

The loop watches descriptors; nothing of kvzc runs on it but the taking of what is there.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

from ._core import CompletionQueue, Transfer

Item = TypeVar("Item", covariant=True)

# Whether a peer is lost is not told by a transfer that is not quiet yet: it is looked at so often.
LOOK_S = 0.1


class Source(Protocol[Item]):
    """What has a descriptor, and gives what is there: ``Arrivals``, ``CompletionQueue``."""

    def fileno(self) -> int: ...
    def poll(self, max: int) -> Sequence[Item]: ...


async def iterate(source: Source[Item]) -> AsyncIterator[Item]:
    """Give what ``source.poll()`` gives, one by one; raise ``Closed`` when the source closes.

    The loop watches a duplicate of ``source.fileno()``, so that several iterations, and other
    users of the descriptor, do not take it from each other.
    """
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    descriptor = os.dup(source.fileno())
    try:
        while True:
            # One at a time: whoever leaves the loop leaves the rest to others.
            while batch := source.poll(1):
                yield batch[0]
            readable.clear()
            # What came between the poll and here has made the descriptor readable.
            loop.add_reader(descriptor, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(descriptor)
    finally:
        os.close(descriptor)


class _Ends:
    """Tells the futures of one event loop that their transfers have ended.

    Nothing here refers to the loop but futures that are awaited, so that a loop which is gone takes
    this along. However often a transfer is awaited, it is watched once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._queue = CompletionQueue(sys.maxsize)
        # A transfer is a key from its first await to its end, also when nobody awaits it any more.
        self._waiting: dict[Transfer, set[asyncio.Future[None]]] = {}
        self._looks = False
        loop.add_reader(self._queue.fileno(), self._tell)

    async def wait(self, transfer: Transfer) -> None:
        loop = asyncio.get_running_loop()
        if transfer not in self._waiting:
            self._queue._add(transfer, None)
            self._waiting[transfer] = set()
        future: asyncio.Future[None] = loop.create_future()
        futures = self._waiting[transfer]
        futures.add(future)
        if not self._looks:
            self._looks = True
            loop.call_later(LOOK_S, self._look, loop)
        try:
            await future
        finally:
            futures.discard(future)

    def _tell(self) -> None:
        for transfer in self._queue.poll(256):
            for future in self._waiting.pop(transfer, ()):
                if not future.done():
                    future.set_result(None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._looks = False
        for transfer, futures in list(self._waiting.items()):
            lost = transfer._lost if futures else None
            if lost is None:
                continue
            for future in futures:
                if not future.done():
                    future.set_exception(lost)
        if any(self._waiting.values()):
            self._looks = True
            loop.call_later(LOOK_S, self._look, loop)


_ends: WeakKeyDictionary[asyncio.AbstractEventLoop, _Ends] = WeakKeyDictionary()


async def wait(transfer: Transfer) -> None:
    """Return when the transfer is done; raise its error."""
    if not transfer.done:
        loop = asyncio.get_running_loop()
        ends = _ends.get(loop)
        if ends is None:
            ends = _ends[loop] = _Ends(loop)
        await ends.wait(transfer)
    transfer.wait(0)
