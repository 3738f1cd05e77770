"""Child 3: does prefill and decode alone, without kvzc, and measures plain copies."""

from __future__ import annotations

import time

import torch

from kvzc.demo.cache import PagedCache, allocate, cache_shape
from kvzc.demo.channel import Channel, serve
from kvzc.demo.floor import measure_copies
from kvzc.demo.job import Job
from kvzc.demo.model import Model


def reference(channel: Channel, job: Job) -> None:
    """Answers the request with the same code as the two processes, in blocks of its own."""
    layers, length = job.model.layers, len(job.tokens)
    channel.progress("making the model")
    model = Model(job.model, job.seed, length + job.generate)
    blocks = allocate(job.all_blocks, job.all_blocks, seed=job.seed + 3)
    tensor = torch.zeros(cache_shape(job.model, job.all_blocks, job.block_tokens))
    cache = PagedCache(tensor, blocks)

    def layer_done(layer: int) -> None:
        if layer + 1 < layers:
            channel.progress(f"computing layer {layer + 2}/{layers}")

    channel.progress(f"computing layer 1/{layers}")
    start_ns = time.monotonic_ns()
    first_token = model.prefill(job.tokens, cache, layer_done=layer_done)
    prefill_ns = time.monotonic_ns() - start_ns
    channel.progress(f"generating {job.generate} tokens")
    tokens = list(model.generate(first_token, length, job.generate, cache))
    channel.send("generated", tokens=tokens, prefill_ns=prefill_ns, digests=cache.digests(length))

    channel.progress("measuring plain copies of the same bytes")
    channel.send("copied", **measure_copies(tensor, blocks[: job.prompt_blocks], job.seed))


if __name__ == "__main__":
    serve(reference)
