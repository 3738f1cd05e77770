"""Child 2: owns the cache that prefill writes into, waits for every layer, then generates."""

from __future__ import annotations

import time

import torch

import kvzc
from kvzc.demo.cache import PagedCache, allocate, cache_shape
from kvzc.demo.channel import Channel, serve
from kvzc.demo.job import Job
from kvzc.demo.model import Model
from kvzc.demo.text import BEGIN


class LayerLost(RuntimeError):
    """A layer's transfer failed on the other side."""


def decode(channel: Channel, job: Job) -> None:
    """Receives one request's KV and continues it."""
    layers, length = job.model.layers, len(job.tokens)
    channel.progress("making the model")
    model = Model(job.model, job.seed, length + job.generate)

    num_blocks = job.all_blocks * 3 // 2 + 1
    tensor = kvzc.empty(cache_shape(job.model, num_blocks, job.block_tokens), torch.float32)
    # What earlier requests left behind. Zeros would be too kind to a layer that is missing.
    tensor.normal_(generator=torch.Generator().manual_seed(job.seed + 2))
    blocks = allocate(num_blocks, job.all_blocks, seed=job.seed + 2)
    cache = PagedCache(tensor, blocks)
    model.decode(BEGIN, length, cache)  # the kernels' first use is slow

    with (
        kvzc.Engine(transports=job.transports, listen=job.listen, secret=job.secret) as engine,
        engine.register(tensor) as region,
    ):
        prompt_blocks = blocks[: job.prompt_blocks]
        channel.send("ready", handle=region.handle().to_text(), blocks=prompt_blocks)

        arrived_ns = []
        for layer in range(layers):
            channel.progress(f"waiting for layer {layer + 1}/{layers}")
            arrival = engine.arrivals.wait(job.tag(layer), timeout=job.timeout_s)
            if arrival.error:
                raise LayerLost(f"layer {layer} did not arrive: {arrival.error}")
            arrived_ns.append(arrival.arrived_ns)
        channel.send("arrived", arrived_ns=arrived_ns)

        channel.progress("waiting for the first token")
        first_token = channel.receive("generate", job.timeout_s)["first_token"]
        channel.progress(f"generating {job.generate} tokens")
        start_ns = time.monotonic_ns()
        tokens = list(model.generate(first_token, length, job.generate, cache))
        generate_ns = time.monotonic_ns() - start_ns
        channel.send(
            "generated", tokens=tokens, generate_ns=generate_ns, digests=cache.digests(length)
        )


if __name__ == "__main__":
    serve(decode)
