"""Arrivals on an event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._core import Arrival, Arrivals


async def iterate(arrivals: Arrivals) -> AsyncIterator[Arrival]:
    """Give arrivals as ``arrivals.poll()`` does; raise ``Closed`` when their engine closes.

    The loop watches a duplicate of ``arrivals.fileno()``, so that several iterations, and other
    users of the descriptor, do not take it from each other.
    """
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    descriptor = os.dup(arrivals.fileno())
    try:
        while True:
            # One at a time: whoever leaves the loop leaves the rest to others.
            while batch := arrivals.poll(1):
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
