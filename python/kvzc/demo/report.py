"""The result of a run: as a dictionary for tools, as a table for people."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from kvzc.demo import text
from kvzc.demo.job import Job

_ONE_CLOCK = "CLOCK_MONOTONIC of this host, one clock for all processes"
_TWO_CLOCKS = "CLOCK_MONOTONIC of prefill's host; a layer has arrived when prefill knows it"
_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True)
class Words:
    """What the processes said, event by event; see the modules that send them."""

    pids: dict[str, int]
    blocks: dict[str, list[int]]
    parameters: int
    prefilled: dict[str, Any]
    sent: dict[str, Any]
    arrived: dict[str, Any]
    generated: dict[str, Any]
    alone: dict[str, Any]
    copies: dict[str, Any]


def result(job: Job, words: Words) -> dict[str, Any]:
    """All numbers of one run. Times ``*_ns`` are readings of the host's monotonic clock."""
    layers = _layers(job, words)
    transfers = words.sent["transfers"]
    split, alone = words.generated["tokens"], words.alone["tokens"]
    equal = split == alone
    corrupt = job.omitted_layer is not None
    nbytes = sum(transfer["bytes"] for transfer in transfers)
    busy_ns = _covered((each["submitted_ns"], each["done_ns"]) for each in transfers)
    compute_end_ns = layers[-1]["end_ns"]
    exposed_ns = max(0, max(layer["arrived_ns"] for layer in layers) - compute_end_ns)
    copies = words.copies
    return {
        "ok": equal != corrupt,
        "mode": "corrupt" if corrupt else "normal",
        "omitted_layer": job.omitted_layer,
        "verdict": _verdict(job, split, alone, layers),
        "clock": _TWO_CLOCKS if job.has_two_hosts else _ONE_CLOCK,
        "model": {**vars(job.model), "parameters": words.parameters, "seed": job.seed},
        "request": {
            "prompt_tokens": len(job.tokens),
            "generated_tokens": job.generate,
            "block_tokens": job.block_tokens,
            "prompt_blocks": job.prompt_blocks,
            "kv_bytes": job.layer_bytes * job.model.layers,
            "prefill_blocks": words.blocks["prefill"],
            "decode_blocks": words.blocks["decode"],
        },
        "processes": {**words.pids, "threads": job.threads},
        "transport": ", ".join(sorted({transfer["transport"] for transfer in transfers})),
        "layers": layers,
        "totals": {
            "bytes": nbytes,
            "runs": sum(transfer["runs"] for transfer in transfers),
            "prefill_ms": _ms(compute_end_ns - words.prefilled["start_ns"]),
            "put_calls_ms": sum(layer["put_call_ms"] for layer in layers),
            "transfer_ms": _ms(busy_ns),
            "exposed_ms": _ms(exposed_ns),
            "transfer_gib_per_s": _rate(nbytes, busy_ns),
            "memcpy_ms": _ms(copies["memcpy_ns"]),
            "memcpy_gib_per_s": _rate(copies["bytes"], copies["memcpy_ns"]),
            "index_copy_ms": _ms(copies["index_copy_ns"]),
            "index_copy_gib_per_s": _rate(copies["bytes"], copies["index_copy_ns"]),
            "generate_ms": _ms(words.generated["generate_ns"]),
            "reference_prefill_ms": _ms(words.alone["prefill_ns"]),
        },
        "split": {"tokens": split, "text": text.decode(split)},
        "reference": {"tokens": alone, "text": text.decode(alone)},
    }


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    model, request, totals = result["model"], result["request"], result["totals"]
    processes = result["processes"]
    lines = [
        "kvzc demo: one request, its prompt computed in one process, its answer in another",
        "",
        _line(
            "model",
            f"{model['layers']} layers, hidden {model['hidden']}, "
            f"{model['heads']} query and {model['kv_heads']} KV heads of {model['head_dim']}, "
            f"SwiGLU {model['mlp']}, float32, {model['parameters'] / 1e6:.1f} M random weights",
        ),
        _line(
            "request",
            f"{request['prompt_tokens']} prompt tokens, {request['generated_tokens']} to generate; "
            f"KV cache {request['kv_bytes'] / _MIB:.1f} MiB in {request['prompt_blocks']} blocks "
            f"of {request['block_tokens']} tokens",
        ),
        _line(
            "blocks",
            f"{_some(request['prefill_blocks'])} in prefill, "
            f"{_some(request['decode_blocks'])} in decode",
        ),
        _line(
            "processes",
            f"prefill {processes['prefill']}, decode {processes['decode']}; "
            f"{_count(processes['threads'], 'torch thread')} each",
        ),
        _line("transport", result["transport"]),
        "",
        *_layer_table(result),
        "",
        _line(
            "prefill",
            f"{totals['prefill_ms']:.1f} ms until the first token, of which "
            f"{totals['put_calls_ms']:.2f} ms inside the calls of put",
        ),
        _line(
            "transfer",
            f"{totals['bytes'] / _MIB:.1f} MiB in {totals['runs']} runs, "
            f"{totals['transfer_ms']:.1f} ms, {totals['transfer_gib_per_s']:.2f} GiB/s "
            "while prefill computes",
        ),
        _line(
            "exposed",
            f"{totals['exposed_ms']:.2f} ms, from the end of the last layer's compute "
            "to the last arrival in decode",
        ),
        _line(
            "memcpy",
            f"{totals['memcpy_ms']:.1f} ms, {totals['memcpy_gib_per_s']:.2f} GiB/s: "
            "the same bytes in one process, one contiguous copy a layer",
        ),
        _line(
            "indexing",
            f"{totals['index_copy_ms']:.1f} ms, "
            f"{totals['index_copy_gib_per_s']:.2f} GiB/s: "
            "the same, block by block with torch: t[:, b] = s[:, a]",
        ),
        _line(
            "decode",
            f"{totals['generate_ms']:.1f} ms for the other "
            f"{_count(request['generated_tokens'] - 1, 'token')}",
        ),
        "",
        _answer("split", result["split"]),
        _answer("reference", result["reference"]),
        "",
        *wrap(result["verdict"], 96),
    ]
    return "\n".join(lines)


def _layers(job: Job, words: Words) -> list[dict[str, Any]]:
    rows = []
    start_ns = words.prefilled["start_ns"]
    for layer, times in enumerate(words.prefilled["layers"]):
        transfer = words.sent["transfers"][layer]
        # Another host has another clock.
        arrived_ns = (
            transfer["done_ns"] if job.has_two_hosts else words.arrived["arrived_ns"][layer]
        )
        put_call_ns = times["put_returned_ns"] - times["kv_ready_ns"]
        rows.append(
            {
                "layer": layer,
                "bytes": transfer["bytes"],
                "runs": transfer["runs"],
                "compute_ms": _ms(times["end_ns"] - start_ns - put_call_ns),
                "put_call_ms": _ms(put_call_ns),
                "put_ms": _ms(transfer["done_ns"] - transfer["submitted_ns"]),
                "arrival_ms": _ms(arrived_ns - times["kv_ready_ns"]),
                "after_compute_ms": _ms(arrived_ns - times["end_ns"]),
                "kv_ready_ns": times["kv_ready_ns"],
                "submitted_ns": transfer["submitted_ns"],
                "done_ns": transfer["done_ns"],
                "arrived_ns": arrived_ns,
                "end_ns": times["end_ns"],
                "kv_equal": words.generated["digests"][layer] == words.alone["digests"][layer],
            }
        )
        start_ns = times["end_ns"]
    return rows


def _layer_table(result: dict[str, Any]) -> list[str]:
    lines = [
        "layer  compute ms   put ms  arrival ms  after compute ms       bytes   runs  KV",
        *(
            f"{row['layer']:5}  {row['compute_ms']:10.1f}  {row['put_ms']:7.2f}  "
            f"{row['arrival_ms']:10.2f}  {row['after_compute_ms']:16.2f}  {row['bytes']:10}  "
            f"{row['runs']:5}  {'equal' if row['kv_equal'] else 'differs'}"
            + (" (left out)" if row["layer"] == result["omitted_layer"] else "")
            for row in result["layers"]
        ),
        "",
        *wrap(
            "put: from submitted to done. arrival: from the layer's KV complete in prefill to its "
            "notify in decode. after compute: from the end of the layer's compute to the same "
            "notify; below zero, it was there before the layer ended. The last layer computes keys "
            f"and values for all tokens, the rest for one. All times: {result['clock']}.",
            89,
        ),
    ]
    return lines


def _verdict(job: Job, split: list[int], alone: list[int], layers: list[dict[str, Any]]) -> str:
    differing = [str(row["layer"]) for row in layers if not row["kv_equal"]]
    where = f"; the KV of layer {', '.join(differing)} differs" if differing else ""
    if split == alone:
        same = f"all {len(split)} tokens of the two processes and of the one are equal"
        if job.omitted_layer is None:
            return f"EQUAL: {same}."
        return f"NOT AS INTENDED: layer {job.omitted_layer} was left out, and yet {same}{where}."
    first = next(i for i, (a, b) in enumerate(zip(split, alone, strict=True)) if a != b)
    differ = f"the answers differ from token {first} of {len(split)} on{where}"
    if job.omitted_layer is None:
        return f"DIFFERENT: {differ}. The transfer or the model is wrong."
    return (
        f"DIFFERENT, AS INTENDED: layer {job.omitted_layer} was left out and its notify sent; "
        f"{differ}. The comparison notices a transfer that is wrong."
    )


def _covered(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union of the intervals: transfers that overlap count once."""
    total, end = 0, 0
    for begin, stop in sorted(intervals):
        total += max(0, stop - max(begin, end))
        end = max(end, stop)
    return total


def _line(name: str, value: str) -> str:
    head, *rest = wrap(value, 84)
    return "\n".join([f"{name:<10}  {head}", *(" " * 12 + line for line in rest)])


def _answer(name: str, answer: dict[str, Any]) -> str:
    ids = " ".join(map(str, answer["tokens"]))
    return f"{name:<10}  {answer['text']}\n" + "\n".join(" " * 12 + line for line in wrap(ids, 84))


def _some(blocks: list[int]) -> str:
    return ", ".join(map(str, blocks[:4])) + (" ..." if len(blocks) > 4 else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _ms(ns: int) -> float:
    return ns / 1e6


def _rate(nbytes: int, ns: int) -> float:
    """GiB/s, 0 where nothing took any time."""
    return nbytes / _GIB / (ns / 1e9) if ns else 0.0
