"""The paged KV cache: fixed blocks of tokens, and one request's table of block ids."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from kvzc.demo.job import ModelConfig

Shape = tuple[int, int, int, int, int, int]


def cache_shape(config: ModelConfig, num_blocks: int, block_tokens: int) -> Shape:
    """(layers, 2 for key and value, blocks, tokens per block, KV heads, head_dim)."""
    return (config.layers, 2, num_blocks, block_tokens, config.kv_heads, config.head_dim)


def allocate(num_blocks: int, count: int, seed: int) -> list[int]:
    """``count`` of ``num_blocks`` block ids from a shuffled free list.

    Shuffled as in an engine that has served for a while: the blocks of a request are scattered.
    """
    if count > num_blocks:
        raise ValueError(f"{count} blocks asked, the cache has {num_blocks}")
    free = list(range(num_blocks))
    random.Random(seed).shuffle(free)
    return free[:count]


class PagedCache:
    """One request's pages in a cache tensor of shape ``cache_shape(...)``.

    Position ``p`` of the request lives in block ``blocks[p // block_tokens]``, at row
    ``p % block_tokens``.
    """

    def __init__(self, tensor: Tensor, blocks: Sequence[int]) -> None:
        self.tensor = tensor
        self.blocks = list(blocks)
        self._block_ids = torch.tensor(self.blocks, dtype=torch.int64)
        self._block_tokens = tensor.shape[3]

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        """Stores key and value, (tokens, kv_heads, head_dim) each, from position ``start`` on."""
        position = torch.arange(start, start + len(key))
        block = self._block_ids[position // self._block_tokens]
        slot = block * self._block_tokens + position % self._block_tokens
        for page, new in zip(self.tensor[layer], (key, value), strict=True):
            page.flatten(0, 1).index_copy_(0, slot, new)

    def read(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Copies of the first ``length`` keys and values, (length, kv_heads, head_dim) each."""
        used = self._block_ids[: -(-length // self._block_tokens)]
        key, value = (
            page.index_select(0, used).flatten(0, 1)[:length] for page in self.tensor[layer]
        )
        return key, value

    def digests(self, length: int) -> list[str]:
        """One digest per layer of the first ``length`` keys and values, to compare two caches."""
        found = []
        for layer in range(self.tensor.shape[0]):
            digest = hashlib.blake2b(digest_size=16)
            for part in self.read(layer, length):
                digest.update(part.numpy().tobytes())
            found.append(digest.hexdigest())
        return found
