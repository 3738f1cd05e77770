"""A small decoder-only transformer, for inference: RMSNorm, RoPE, grouped queries, SwiGLU.

The weights are random. What the model says means nothing; that it depends on every byte of its
KV cache is all that the demo needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvzc.demo.cache import PagedCache
from kvzc.demo.job import ModelConfig

#: Generated tokens are chosen among the printable ASCII bytes, so that a terminal can show them.
FIRST_CHOICE, LAST_CHOICE = 0x20, 0x7E

# Standard deviations of the weights, in units of 1/sqrt(fan-in). Queries and keys are larger, so
# that attention picks few positions instead of averaging all: a wrong block changes the output.
_SCALE = 1.0
_QUERY_KEY_SCALE = 2.5


@dataclass(frozen=True)
class Layer:
    """One layer's weights, each of shape (fan-in, fan-out), used as ``x @ w``."""

    query: Tensor  # (hidden, heads * head_dim)
    key: Tensor  # (hidden, kv_heads * head_dim)
    value: Tensor  # (hidden, kv_heads * head_dim)
    output: Tensor  # (heads * head_dim, hidden)
    gate: Tensor  # (hidden, mlp)
    up: Tensor  # (hidden, mlp)
    down: Tensor  # (mlp, hidden)


class Model:
    """The weights, made from a seed: every process that names the same seed has the same model."""

    def __init__(self, config: ModelConfig, seed: int, max_positions: int) -> None:
        self.config = config
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int, scale: float = _SCALE) -> Tensor:
            return torch.randn(rows, columns, generator=generator).mul_(scale * rows**-0.5)

        hidden, mlp = config.hidden, config.mlp
        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.embedding = torch.randn(config.vocabulary, hidden, generator=generator)
        self.layers = [
            Layer(
                query=weight(hidden, wide, _QUERY_KEY_SCALE),
                key=weight(hidden, narrow, _QUERY_KEY_SCALE),
                value=weight(hidden, narrow),
                output=weight(wide, hidden),
                gate=weight(hidden, mlp),
                up=weight(hidden, mlp),
                down=weight(mlp, hidden),
            )
            for _ in range(config.layers)
        ]
        self.head = weight(hidden, config.vocabulary)
        self._cos, self._sin = _rotations(max_positions, config.head_dim, config.rope_base)

    def parameters(self) -> int:
        """Number of weights."""
        tensors = [self.embedding, self.head]
        tensors += [tensor for layer in self.layers for tensor in vars(layer).values()]
        return sum(tensor.numel() for tensor in tensors)

    @torch.inference_mode()
    def prefill(
        self,
        tokens: list[int],
        cache: PagedCache,
        kv_ready: Callable[[int], Any] = lambda layer: None,
        layer_done: Callable[[int], Any] = lambda layer: None,
    ) -> int:
        """Computes the whole prompt and returns the first generated token.

        ``kv_ready(layer)`` is called as soon as the cache holds that layer's keys and values of
        all the prompt, before the layer's attention; ``layer_done(layer)`` at the layer's end
        (for the last layer: when the first token is known).
        """
        x = self.embedding[torch.tensor(tokens)]  # (tokens, hidden)
        last = self.config.layers - 1
        for index in range(self.config.layers):
            layer = self.layers[index]
            normed = _rms_norm(x)
            key, value = self._key_value(layer, normed, start=0)
            cache.write(index, 0, key, value)
            kv_ready(index)
            if index < last:
                query = self._query(layer, normed, start=0)
                x = x + attend_causal(query, key, value).flatten(1) @ layer.output
                x = x + _mlp(layer, _rms_norm(x))
                layer_done(index)
            else:
                # Beyond the last layer's keys and values, only the last position is of use.
                query = self._query(layer, normed[-1:], start=len(tokens) - 1)
                x = x[-1:] + attend_one(query[0], key, value).view(1, -1) @ layer.output
                x = x + _mlp(layer, _rms_norm(x))
        token = self._choose(x)
        layer_done(last)
        return token

    @torch.inference_mode()
    def decode(self, token: int, position: int, cache: PagedCache) -> int:
        """Adds ``token`` at ``position`` to the cache and returns the token that follows it."""
        x = self.embedding[token].view(1, -1)
        for index, layer in enumerate(self.layers):
            normed = _rms_norm(x)
            key, value = self._key_value(layer, normed, start=position)
            cache.write(index, position, key, value)
            query = self._query(layer, normed, start=position)
            keys, values = cache.read(index, position + 1)
            x = x + attend_one(query[0], keys, values).view(1, -1) @ layer.output
            x = x + _mlp(layer, _rms_norm(x))
        return self._choose(x)

    def generate(self, first: int, position: int, count: int, cache: PagedCache) -> Iterator[int]:
        """Yields ``count`` tokens: ``first``, which belongs at ``position``, and its successors."""
        token = first
        yield token
        for step in range(count - 1):
            token = self.decode(token, position + step, cache)
            yield token

    def _query(self, layer: Layer, normed: Tensor, start: int) -> Tensor:
        query = (normed @ layer.query).view(-1, self.config.heads, self.config.head_dim)
        return self._rotate(query, start)  # (tokens, heads, head_dim)

    def _key_value(self, layer: Layer, normed: Tensor, start: int) -> tuple[Tensor, Tensor]:
        shape = (-1, self.config.kv_heads, self.config.head_dim)
        key = self._rotate((normed @ layer.key).view(shape), start)
        return key, (normed @ layer.value).view(shape)  # (tokens, kv_heads, head_dim) each

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        """RoPE (Su et al. 2021, arXiv:2104.09864) of x, (tokens, heads, head_dim), from ``start``.

        Element i is paired with i + head_dim / 2.
        """
        cos = self._cos[start : start + len(x), None, :]
        sin = self._sin[start : start + len(x), None, :]
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    def _choose(self, x: Tensor) -> int:
        """The most likely printable byte after the last position of ``x``: (1, hidden)."""
        logits = (_rms_norm(x) @ self.head)[0]
        return FIRST_CHOICE + int(logits[FIRST_CHOICE : LAST_CHOICE + 1].argmax())


def attend_causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of all positions to themselves and those before.

    query: (tokens, heads, head_dim); key, value: (tokens, kv_heads, head_dim); query head ``h``
    uses KV head ``h // (heads / kv_heads)``. Returns (tokens, heads, head_dim).
    """
    group = query.shape[1] // key.shape[1]
    q = query.transpose(0, 1)[None]
    k = key.repeat_interleave(group, dim=1).transpose(0, 1)[None]
    v = value.repeat_interleave(group, dim=1).transpose(0, 1)[None]
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return attended[0].transpose(0, 1)


def attend_one(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of one position to all of ``keys``.

    query: (heads, head_dim); keys, values: (tokens, kv_heads, head_dim). Returns (heads, head_dim).
    """
    kv_heads = keys.shape[1]
    # The query heads that share a KV head stand where several query positions would.
    q = query.view(1, kv_heads, -1, query.shape[-1])
    k, v = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    return functional.scaled_dot_product_attention(q, k, v).reshape(query.shape)


def _rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)


def _mlp(layer: Layer, x: Tensor) -> Tensor:
    return (functional.silu(x @ layer.gate) * (x @ layer.up)) @ layer.down


def _rotations(positions: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()  # (positions, head_dim / 2) each
