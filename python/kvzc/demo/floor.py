"""What the same bytes cost inside one process: the floor that a transfer is measured against."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median

from torch import Tensor

_PASSES = 5


def measure_copies(cache: Tensor, blocks: list[int], seed: int) -> dict[str, int]:
    """Times to copy the ``blocks`` of all layers between two ordinary buffers, one thread, in ns.

    ``memcpy_ns``: each layer's bytes as one contiguous copy, which no scattered copy can beat.
    ``index_copy_ns``: block by block with torch's indexing, into other blocks. Both are medians
    of five passes over memory that was touched before.
    """
    others = list(blocks)
    random.Random(seed).shuffle(others)
    packed = cache[:, :, blocks]  # indexing a torch tensor with a list copies
    target = packed.clone()
    scattered = cache.clone()

    def contiguous() -> None:
        for source_layer, target_layer in zip(packed, target, strict=True):
            target_layer.copy_(source_layer)

    def indexed() -> None:
        for source_layer, target_layer in zip(cache, scattered, strict=True):
            target_layer[:, others] = source_layer[:, blocks]

    return {
        "bytes": packed.numel() * packed.element_size(),
        "memcpy_ns": _time(contiguous),
        "index_copy_ns": _time(indexed),
    }


def _time(copy: Callable[[], None]) -> int:
    times = []
    for _ in range(_PASSES):
        start_ns = time.monotonic_ns()
        copy()
        times.append(time.monotonic_ns() - start_ns)
    return int(median(times))
