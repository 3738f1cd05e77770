"""The demo: its model and cache, the whole run, and a process that dies in the middle."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kvzc.demo import text
from kvzc.demo.cache import PagedCache, allocate, cache_shape
from kvzc.demo.crew import ChildSilent, Crew, Progress
from kvzc.demo.job import Job, ModelConfig
from kvzc.demo.model import Model, attend_causal, attend_one

SMALL = ModelConfig(layers=3, hidden=96, heads=4, kv_heads=2, head_dim=24, mlp=128)
BLOCK_TOKENS = 8
POSITIONS = 128


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(SMALL, seed=0, max_positions=POSITIONS)


def prompt(count: int) -> list[int]:
    return text.encode(text.read_text(None), count)


def make_cache(num_blocks: int, seed: int, stale: bool = False) -> PagedCache:
    tensor = torch.zeros(cache_shape(SMALL, num_blocks, BLOCK_TOKENS))
    if stale:
        tensor.normal_(generator=torch.Generator().manual_seed(seed))
    return PagedCache(tensor, allocate(num_blocks, POSITIONS // BLOCK_TOKENS, seed))


def answer(model: Model, cache: PagedCache, tokens: list[int], count: int = 16) -> list[int]:
    first = model.prefill(tokens, cache)
    return list(model.generate(first, len(tokens), count, cache))


# ---- model and cache ----


def dense_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention written out, head by head and row by row."""
    tokens, heads, head_dim = query.shape
    group = heads // key.shape[1]
    out = torch.empty_like(query)
    for head in range(heads):
        for row in range(tokens):
            keys, values = key[: row + 1, head // group], value[: row + 1, head // group]
            weights = torch.softmax(keys @ query[row, head] / head_dim**0.5, dim=0)
            out[row, head] = weights @ values
    return out


def test_attention_is_the_textbook_one() -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(21, 4, 24, generator=generator)
    key, value = torch.randn(2, 21, 2, 24, generator=generator)
    dense = dense_attention(query, key, value)
    torch.testing.assert_close(attend_causal(query, key, value), dense)
    torch.testing.assert_close(attend_one(query[-1], key, value), dense[-1])


@pytest.mark.parametrize("length", [1, 7, 8, 9, 64, 77])
def test_paged_attention_equals_dense(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(length, 4, 24, generator=generator)
    key, value = torch.randn(2, length, 2, 24, generator=generator)
    cache = make_cache(num_blocks=20, seed=5, stale=True)
    cache.write(1, 0, key[: length // 2], value[: length // 2])
    cache.write(1, length // 2, key[length // 2 :], value[length // 2 :])
    paged_key, paged_value = cache.read(1, length)
    assert torch.equal(paged_key, key)
    assert torch.equal(paged_value, value)
    dense = dense_attention(query, key, value)[-1]
    torch.testing.assert_close(attend_one(query[-1], paged_key, paged_value), dense)


def test_writes_touch_only_their_own_rows() -> None:
    cache = make_cache(num_blocks=20, seed=3, stale=True)
    before = cache.tensor.clone()
    new = torch.ones(1, 2, 24)
    cache.write(2, 11, new, 2 * new)
    block, row = cache.blocks[11 // BLOCK_TOKENS], 11 % BLOCK_TOKENS
    assert (cache.tensor[2, 0, block, row] == 1).all()
    assert (cache.tensor[2, 1, block, row] == 2).all()
    cache.tensor[2, :, block, row] = before[2, :, block, row]
    assert torch.equal(cache.tensor, before)


def test_decode_continues_as_prefill_would(model: Model) -> None:
    tokens = prompt(60)
    stepped, whole = make_cache(16, seed=1), make_cache(16, seed=2)
    model.prefill(tokens[:40], stepped)
    for position in range(40, 60):
        following = model.decode(tokens[position], position, stepped)
    assert following == model.prefill(tokens, whole)
    for layer in range(SMALL.layers):
        for one, other in zip(stepped.read(layer, 60), whole.read(layer, 60), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_block_order_and_stale_blocks_do_not_matter(model: Model) -> None:
    tokens = prompt(61)
    ordered = PagedCache(torch.zeros(cache_shape(SMALL, 16, BLOCK_TOKENS)), range(16))
    shuffled = make_cache(num_blocks=40, seed=7, stale=True)
    assert ordered.blocks != shuffled.blocks
    assert answer(model, ordered, tokens) == answer(model, shuffled, tokens)
    assert ordered.digests(61) == shuffled.digests(61)


def test_the_answer_depends_on_every_layer(model: Model) -> None:
    tokens = prompt(61)
    cache = make_cache(16, seed=1)
    expected = answer(model, cache, tokens)
    assert len(set(expected)) > len(expected) // 3, "the answer repeats itself"
    first = model.prefill(tokens, cache)
    good = cache.tensor.clone()
    for layer in range(SMALL.layers):
        for wrong in (torch.zeros(good[layer].shape), good[layer].flip(1)):
            cache.tensor.copy_(good)
            cache.tensor[layer] = wrong
            assert list(model.generate(first, 61, 16, cache)) != expected


def test_kv_is_complete_when_it_is_said_to_be(model: Model) -> None:
    cache, seen = make_cache(16, seed=1), []

    def kv_ready(layer: int) -> None:
        seen.append((layer, cache.digests(50)[layer]))

    model.prefill(prompt(50), cache, kv_ready)
    assert seen == list(enumerate(cache.digests(50)))


def test_same_seed_same_model(model: Model) -> None:
    again, other = Model(SMALL, 0, POSITIONS), Model(SMALL, 1, POSITIONS)
    assert torch.equal(again.head, model.head)
    assert not torch.equal(other.head, model.head)


def test_allocate_refuses_what_it_does_not_have() -> None:
    assert sorted(allocate(9, 9, seed=0)) == list(range(9))
    with pytest.raises(ValueError, match="10 blocks asked, the cache has 9"):
        allocate(9, 10, seed=0)


def test_prompt_is_the_text() -> None:
    shipped = text.read_text(None)
    assert shipped.isascii()
    assert len(shipped) >= 4096
    assert text.encode(b"abc", 4) == [text.BEGIN, 97, 98, 99]
    assert text.decode([97, 10, 256, 98]) == "a..b"
    with pytest.raises(text.TextTooShort, match="5 prompt tokens asked, the text has 4"):
        text.encode(b"abc", 5)


# ---- whole runs ----

DEMO = [sys.executable, "-m", "kvzc", "demo"]


def run_demo(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*DEMO, *arguments], capture_output=True, text=True, timeout=120)


def run_json(*arguments: str) -> dict[str, Any]:
    done = run_demo("--json", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tokens", "512", "--layers", "4"],
        # The last block is part full, and blocks are larger.
        ["--tokens", "333", "--layers", "2", "--block-tokens", "32", "--seed", "5"],
    ],
)
def test_split_and_reference_give_equal_answers(arguments: list[str]) -> None:
    result = run_json(*arguments, "--generate", "24")
    tokens, layers = int(arguments[1]), int(arguments[3])
    assert result["ok"] is True
    assert result["mode"] == "normal"
    assert result["verdict"].startswith("EQUAL")
    assert result["split"] == result["reference"]
    assert len(result["split"]["tokens"]) == 24
    assert len(set(result["split"]["tokens"])) > 6

    request, totals = result["request"], result["totals"]
    assert request["prompt_tokens"] == tokens
    assert request["prefill_blocks"] != request["decode_blocks"]
    assert len(request["prefill_blocks"]) == len(request["decode_blocks"])
    assert totals["bytes"] == request["kv_bytes"]
    assert result["transport"]
    assert [row["layer"] for row in result["layers"]] == list(range(layers))
    for row in result["layers"]:
        assert row["kv_equal"]
        assert row["bytes"] * layers == totals["bytes"]
        assert row["runs"] > 0
        assert row["kv_ready_ns"] <= row["submitted_ns"] <= row["done_ns"]
        assert row["kv_ready_ns"] < row["arrived_ns"]
        assert row["kv_ready_ns"] < row["end_ns"]
        assert row["compute_ms"] > 0
    assert totals["exposed_ms"] >= 0
    for name in ("transfer", "memcpy", "index_copy"):
        assert totals[f"{name}_gib_per_s"] > 0
        assert totals[f"{name}_ms"] > 0


def test_a_layer_left_out_is_noticed() -> None:
    result = run_json("--tokens", "512", "--layers", "4", "--corrupt")
    assert result["ok"] is True
    assert result["mode"] == "corrupt"
    assert result["omitted_layer"] == 2
    assert result["verdict"].startswith("DIFFERENT, AS INTENDED")
    assert result["split"]["tokens"] != result["reference"]["tokens"]
    assert [row["kv_equal"] for row in result["layers"]] == [True, True, False, True]
    assert result["layers"][2]["bytes"] == 0


def test_table_for_people() -> None:
    done = run_demo("--tokens", "200", "--layers", "2", "--generate", "8")
    assert done.returncode == 0, done.stderr
    assert "\nEQUAL: all 8 tokens" in done.stdout
    for word in ("transport", "exposed", "memcpy", "GiB/s", "split", "reference"):
        assert word in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(256)))
    done = run_demo("--text", str(file), "--tokens", "300")
    assert done.returncode == 2
    assert "300 prompt tokens asked, the text has 257" in done.stderr
    done = run_demo("--text", str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert "No such file" in done.stderr
    result = run_json("--text", str(file), "--tokens", "257", "--layers", "1", "--generate", "4")
    assert result["verdict"].startswith("EQUAL")


# ---- death in the middle ----


def state(pid: int) -> str:
    """A process's state letter; Z also for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def wait_until_gone(pids: dict[str, int], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while left := {name: pid for name, pid in pids.items() if state(pid) != "Z"}:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


def children(parent: int) -> dict[str, int]:
    """The demo's children by name, from /proc."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            ppid = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_text().split("\0")
            if ppid == parent and len(command) > 2 and command[2].startswith("kvzc.demo."):
                found[command[2].removeprefix("kvzc.demo.")] = int(folder.name)
    return found


@contextlib.contextmanager
def demo_at(line: str, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    """A demo that has just said ``line`` on stderr."""
    with subprocess.Popen(
        [*DEMO, "--tokens", "4096", "--progress", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            for said in process.stderr:
                if said.startswith(line):
                    break
            else:
                pytest.fail(f"the demo ended without {line!r}")
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_killed_process_is_named_and_nothing_is_left(victim: str) -> None:
    with demo_at("prefill: computing layer 3/", "--json") as process:
        pids = children(process.pid)
        assert set(pids) == {"prefill", "decode"}
        start = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        out, err = process.communicate(timeout=30)
        assert time.monotonic() - start < 10
    assert process.returncode == 3
    assert f"ChildDied: {victim} (pid {pids[victim]}) was killed by SIGKILL while" in err
    assert json.loads(out) == {"ok": False, "error": err.splitlines()[-1]}
    wait_until_gone(pids)


def test_interrupt_ends_everything() -> None:
    with demo_at("prefill: computing layer 2/") as process:
        pids = children(process.pid)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "kvzc demo: interrupted; its processes are gone"
    assert "Traceback" not in err
    assert out == ""
    wait_until_gone(pids)


def test_children_die_with_their_parent() -> None:
    with demo_at("prefill: computing layer 2/") as process:
        pids = children(process.pid)
        assert len(pids) == 2
        process.kill()
        process.communicate(timeout=30)
        wait_until_gone(pids)


def test_silent_process_is_given_up() -> None:
    job = Job(SMALL, prompt(20), 4, BLOCK_TOKENS, seed=0, threads=1, timeout_s=0.05)
    with Crew(job, Progress(after_s=60)) as crew:
        child = crew.start("decode")
        with pytest.raises(ChildSilent, match=r"decode .* said nothing .* last word: starting"):
            crew.expect(child, "generated")
    assert child.process.returncode == -signal.SIGKILL
