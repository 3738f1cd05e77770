"""Child 1: computes the prompt and puts each layer's KV into the decode process as it is ready."""

from __future__ import annotations

import time
from typing import Any

import torch

import kvzc
from kvzc.demo.cache import PagedCache, allocate, cache_shape
from kvzc.demo.channel import Channel, serve
from kvzc.demo.job import Job
from kvzc.demo.model import Model

_WARM_UP_TOKENS = 64


def prefill(channel: Channel, job: Job) -> None:
    """Prefills one request into the blocks that the decode process names."""
    layers = job.model.layers
    channel.progress("making the model")
    model = Model(job.model, job.seed, len(job.tokens) + job.generate)

    # An ordinary tensor: any CPU memory can be the source of a put.
    num_blocks = job.prompt_blocks * 5 // 4 + 1
    tensor = torch.zeros(cache_shape(job.model, num_blocks, job.block_tokens))
    blocks = allocate(num_blocks, job.prompt_blocks, seed=job.seed + 1)
    cache = PagedCache(tensor, blocks)
    model.prefill(job.tokens[:_WARM_UP_TOKENS], cache)  # the kernels' first use is slow

    with (
        kvzc.Engine(transports=job.transports, secret=job.secret) as engine,
        engine.register(tensor) as local,
    ):
        channel.send("ready", parameters=model.parameters(), blocks=blocks)
        channel.progress("waiting for the address of the decode cache")
        target = channel.receive("target", job.timeout_s)
        handle = kvzc.RemoteHandle.from_text(target["handle"])
        remote_blocks: list[int] = target["blocks"]
        engine.connect(handle, timeout=job.timeout_s)

        transfers: list[kvzc.Transfer] = []
        times: list[dict[str, Any]] = [{} for _ in range(layers)]

        def put_layer(layer: int) -> None:
            ready_ns = time.monotonic_ns()
            if layer != job.omitted_layer:
                source, view = local[layer, :, blocks], handle[layer, :, remote_blocks]
            else:
                # No blocks, and yet the notify: the other side is told what is not true.
                source, view = local[layer, :, 0:0], handle[layer, :, 0:0]
            # Returns at once: kvzc moves the bytes while this thread goes on with the layer.
            transfers.append(engine.put(source, view, notify=job.tag(layer)))
            times[layer] |= {"kv_ready_ns": ready_ns, "put_returned_ns": time.monotonic_ns()}

        def layer_done(layer: int) -> None:
            times[layer]["end_ns"] = time.monotonic_ns()
            if layer + 1 < layers:
                channel.progress(f"computing layer {layer + 2}/{layers}")

        channel.progress(f"computing layer 1/{layers}")
        start_ns = time.monotonic_ns()
        first_token = model.prefill(job.tokens, cache, put_layer, layer_done)
        channel.send("prefilled", first_token=first_token, start_ns=start_ns, layers=times)

        channel.progress("waiting for the transfers")
        kvzc.wait(transfers, job.timeout_s)
        channel.send("sent", transfers=[_describe(transfer) for transfer in transfers])


def _describe(transfer: kvzc.Transfer) -> dict[str, Any]:
    return {
        "submitted_ns": transfer.submitted_ns,
        "done_ns": transfer.done_ns,
        "bytes": transfer.nbytes,
        "runs": transfer.runs,
        "transport": transfer.transport,
    }


if __name__ == "__main__":
    serve(prefill)
