"""Handles: how they travel, what they give away, and what happens to wrong ones."""

import base64
import copy
import hashlib
import json
import os
import pickle
import re
from collections.abc import Iterator
from typing import Any

import kvzc
import numpy as np
import pytest
from helpers import Peer, State, run_script
from hypothesis import given
from hypothesis import strategies as st

KEY = slice(38, 70)  # Where a handle's key lies: cpp/WIRE.md.


@pytest.fixture(scope="module")
def region() -> Iterator[kvzc.Region]:
    with kvzc.Engine(default_timeout=10) as engine, engine.register(
        {"k": kvzc.empty((6, 4), "float32"), "v": kvzc.empty((6, 4), "float16")}
    ) as made:  # fmt: skip
        yield made


def with_checksum(body: bytes) -> bytes:
    """A handle whose bytes were changed, made to look whole again."""
    return body[:-8] + hashlib.sha256(body[:-8]).digest()[:8]


def describe(handle: Any) -> Any:
    return handle.names, handle.nbytes, handle["k"].shape, handle["v"].dtype, handle.engine


def test_bytes_and_text_round_trip(region: kvzc.Region) -> None:
    handle = region.handle()
    for other in (
        kvzc.RemoteHandle.from_bytes(handle.to_bytes()),
        kvzc.RemoteHandle.from_text(handle.to_text()),
        kvzc.RemoteHandle.from_text(json.loads(json.dumps({"handle": handle.to_text()}))["handle"]),
        pickle.loads(pickle.dumps(handle)),
        copy.copy(handle),
        copy.deepcopy(handle),
    ):
        assert describe(other) == describe(handle)
        assert other.to_bytes() == handle.to_bytes()
        assert other.to_text() == handle.to_text()


def test_text_is_safe_in_urls_and_json(region: kvzc.Region) -> None:
    assert re.fullmatch(r"[A-Za-z0-9._~-]+", region.handle().to_text())


def test_a_handle_of_122_tensors_is_small() -> None:
    tensors = {
        f"model.layers.{layer}.self_attn.{kind}_cache": kvzc.empty((4, 2, 16, 8, 128), "float16")
        for layer in range(61)
        for kind in ("key", "value")
    }
    with kvzc.Engine() as engine, engine.register(tensors) as region:
        handle = region.handle()
        assert len(handle.to_bytes()) <= 1024 + 64 * 122
        assert kvzc.RemoteHandle.from_text(handle.to_text()).names == list(tensors)


def test_a_handle_of_one_tensor_is_at_most_1_kib(engine: kvzc.Engine) -> None:
    with engine.register(kvzc.empty((2,) * 12, "float32")) as region:
        assert len(region.handle().to_bytes()) <= 1024 + 64


def test_every_truncation_is_refused(region: kvzc.Region) -> None:
    data, text = region.handle().to_bytes(), region.handle().to_text()
    for end in range(len(data)):
        with pytest.raises(kvzc.BadHandle):
            kvzc.RemoteHandle.from_bytes(data[:end])
    for end in range(len(text)):
        with pytest.raises(ValueError):
            kvzc.RemoteHandle.from_text(text[:end])
    for more in (data + b"\0", data + data, b"\0" + data):
        with pytest.raises(kvzc.BadHandle):
            kvzc.RemoteHandle.from_bytes(more)


def test_every_flipped_bit_is_refused(region: kvzc.Region) -> None:
    data = region.handle().to_bytes()
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(kvzc.BadHandle):
            kvzc.RemoteHandle.from_bytes(bytes(damaged))


@pytest.mark.parametrize(
    "text", ["", "kvzc1.", "kvzc1.AAAA", "kvzc9.AAAA", "nonsense", "kvzc1.\n", "ключ", "kvzc1.A=="]
)
def test_text_that_is_no_handle_is_refused(text: str) -> None:
    with pytest.raises(kvzc.BadHandle):
        kvzc.RemoteHandle.from_text(text)


def test_a_future_version_is_refused_with_a_remedy(region: kvzc.Region) -> None:
    data = bytearray(region.handle().to_bytes())
    assert data[4] == 1
    data[4] = 2
    with pytest.raises(kvzc.BadHandle, match=r"version 2.*same kvzc"):
        kvzc.RemoteHandle.from_bytes(with_checksum(bytes(data)))


def test_what_is_neither_bytes_nor_text_is_refused(region: kvzc.Region) -> None:
    for wrong in (5, None, [1], region):
        with pytest.raises(TypeError):
            kvzc.RemoteHandle.from_bytes(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            kvzc.RemoteHandle.from_text(wrong)  # type: ignore[arg-type]


@given(st.data())
def test_damaged_bytes_with_a_good_checksum_never_crash(
    region: kvzc.Region, data: st.DataObject
) -> None:
    """REG-21: a decode error, or a handle that is consistent in itself."""
    whole = bytearray(region.handle().to_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(12, len(whole) - 9))
        whole[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
    cut = data.draw(st.integers(0, 3))
    body = bytes(whole[: len(whole) - 8 - cut])
    body = body[:8] + (len(body) + 8).to_bytes(4, "little") + body[12:]
    try:
        handle = kvzc.RemoteHandle.from_bytes(with_checksum(body + b"\0" * 8))
    except kvzc.BadHandle:
        return
    assert handle.nbytes >= 0
    assert repr(handle)
    assert kvzc.RemoteHandle.from_bytes(handle.to_bytes()).nbytes == handle.nbytes


def secrets_of(handle: kvzc.RemoteHandle) -> list[str]:
    key = handle.to_bytes()[KEY]
    texts = [key.hex(), key.hex().upper(), repr(key)[2:-1], handle.to_text()]
    texts += [base64.b64encode(key).decode(), base64.urlsafe_b64encode(key).decode()]
    return [text[at : at + 10] for text in texts for at in range(4, len(text) - 10, 5)]


def test_no_text_of_a_handle_gives_its_key_away(region: kvzc.Region) -> None:
    handle = region.handle()
    secrets = secrets_of(handle)
    forged = bytearray(handle.to_bytes())
    forged[KEY.start] ^= 1
    shown = [
        repr(handle),
        str(handle),
        f"{handle}",
        repr(handle["k"]),
        repr(region),
        str(vars(type(handle))),
    ]
    with kvzc.Engine(default_timeout=5) as engine:
        bad = kvzc.RemoteHandle.from_bytes(with_checksum(bytes(forged)))
        with pytest.raises(kvzc.BadHandle) as raised:
            engine.put(np.zeros((6, 4), np.float32), bad["k"]).wait()
        shown.append(str(raised.value))
        transfer = engine.put(np.zeros((6, 4), np.float32), handle["k"])
        shown += [repr(transfer), repr(engine), repr(engine.stats())]
        transfer.wait()
    for text in shown:
        assert not [secret for secret in secrets if secret in text]


def test_keys_are_never_the_same_twice(engine: kvzc.Engine) -> None:
    cache = kvzc.empty(8, "uint8")
    keys = set()
    for _ in range(50):
        with engine.register(cache) as region:
            keys.add(region.handle().to_bytes()[KEY])
    assert len(keys) == 50


def test_regions_and_engines_are_not_pickled_and_say_what_to_do(
    engine: kvzc.Engine, region: kvzc.Region
) -> None:
    with pytest.raises(TypeError, match="handle"):
        pickle.dumps(region)
    with pytest.raises(TypeError, match="each process"):
        pickle.dumps(engine)
    for other in (region.handle()["k"], region["k"], engine.arrivals):
        with pytest.raises(TypeError):
            pickle.dumps(other)


def put_ones(state: State, handle: kvzc.RemoteHandle) -> None:
    with kvzc.Engine() as engine:
        engine.put(np.ones((6, 4), np.float32), handle["k"]).wait(10)


def test_a_pickled_handle_works_in_a_spawned_process(
    engine: kvzc.Engine, shared_peer: Peer
) -> None:
    """LIFE-13."""
    cache = {"k": kvzc.empty((6, 4), "float32")}
    with engine.register(cache) as region:
        shared_peer.call(put_ones, region.handle())
    assert cache["k"].all()


@pytest.mark.parametrize("byte", [KEY.start, KEY.stop - 1])
def test_a_forged_key_is_a_bad_handle_and_writes_nothing(engine: kvzc.Engine, byte: int) -> None:
    cache = kvzc.empty(8, "uint8")
    with engine.register(cache) as region:
        data = bytearray(region.handle().to_bytes())
        data[byte] ^= 0x40
        forged = kvzc.RemoteHandle.from_bytes(with_checksum(bytes(data)))
        ones = np.ones(8, np.uint8)
        with pytest.raises(kvzc.BadHandle):  # The first to reach this engine.
            engine.put(ones, forged).wait()
        assert not cache.any()
        with kvzc.Engine() as other, pytest.raises(kvzc.BadHandle):
            other.connect(forged)
        engine.put(ones * 0, region.handle()).wait()
        with pytest.raises(kvzc.BadHandle):  # And one on a connection that stands.
            engine.put(ones, forged).wait()
        assert not cache.any()
        engine.put(ones, region.handle()).wait()
        assert cache.all()


def test_a_forged_size_is_a_bad_handle_and_writes_nothing(engine: kvzc.Engine) -> None:
    """The handle says 2**20 bytes where the owner has 4096."""
    cache = kvzc.empty(4096, "uint8")
    with engine.register(cache) as region, engine.register(kvzc.empty(1 << 20, "uint8")) as large:
        mine, other = region.handle().to_bytes(), large.handle().to_bytes()
        identity = slice(28, 70)  # Grant id, access, device, key.
        mixed = other[: identity.start] + mine[identity] + other[identity.stop :]
        forged = kvzc.RemoteHandle.from_bytes(with_checksum(mixed))
        assert forged.nbytes == 1 << 20
        with pytest.raises(kvzc.BadHandle, match="disagree"):
            engine.put(np.ones(1 << 20, np.uint8), forged).wait()
        with pytest.raises(kvzc.BadHandle):
            engine.put(np.ones(8, np.uint8), forged[:8]).wait()
    assert not cache.any()


def test_a_grant_id_that_was_never_given_is_refused(engine: kvzc.Engine) -> None:
    cache = kvzc.empty(8, "uint8")
    with engine.register(cache) as region:
        data = bytearray(region.handle().to_bytes())
        data[28:36] = (2**63 + 12345).to_bytes(8, "little")
        forged = kvzc.RemoteHandle.from_bytes(with_checksum(bytes(data)))
        with pytest.raises((kvzc.BadHandle, kvzc.Revoked)):
            engine.put(np.ones(8, np.uint8), forged).wait()
    assert not cache.any()


def test_a_handle_of_an_earlier_life_is_stale(engine: kvzc.Engine) -> None:
    cache = kvzc.empty(8, "uint8")
    ones = np.ones(8, np.uint8)
    name = f"restarts-{os.getpid()}"
    with kvzc.Engine(name) as first, first.register(cache) as region:
        used, fresh = region.handle(), kvzc.RemoteHandle.from_bytes(region.handle().to_bytes())
        engine.put(ones * 0, used).wait()
    with kvzc.Engine(name) as second, second.register(cache) as region:
        with kvzc.Engine() as never_met, pytest.raises(kvzc.StaleHandle, match=name):
            never_met.put(ones, fresh).wait()
        with pytest.raises((kvzc.StaleHandle, kvzc.Revoked)):  # Its region was closed before.
            engine.put(ones, used).wait()
        assert not cache.any()
        engine.put(ones, region.handle()).wait()  # A new handle connects by itself.
        assert cache.all()


def own(state: State, name: str) -> bytes:
    state.engine = kvzc.Engine(name)
    state.cache = kvzc.empty(8, "uint8")
    state.region = state.engine.register(state.cache)
    handle: bytes = state.region.handle().to_bytes()
    return handle


def untouched(state: State) -> bool:
    return not state.cache.any()


def test_a_killed_and_restarted_owner_is_never_written_by_old_handles(
    engine: kvzc.Engine,
) -> None:
    name = f"reborn-{os.getpid()}"
    with Peer() as first:
        old = kvzc.RemoteHandle.from_bytes(first.call(own, name))
        engine.put(np.ones(8, np.uint8), old).wait()
        first.kill()
    with Peer() as second:
        fresh = kvzc.RemoteHandle.from_bytes(second.call(own, name))
        with pytest.raises(ConnectionError):
            engine.put(np.ones(8, np.uint8), old).wait()
        with kvzc.Engine() as other, pytest.raises(kvzc.StaleHandle):
            other.put(np.ones(8, np.uint8), old).wait()
        assert second.call(untouched)
        engine.put(np.ones(8, np.uint8), fresh).wait()
        assert not second.call(untouched)


def test_a_name_that_is_taken_is_refused(engine: kvzc.Engine) -> None:
    with pytest.raises(kvzc.Error, match=engine.name):
        kvzc.Engine(engine.name)


# ---- users ----

OTHER_USER = 65534

STRANGER = """
import os, sys
import kvzc
import numpy as np
text, allow = sys.argv[1], sys.argv[2:]
os.setgid(65534); os.setuid(65534)
handle = kvzc.RemoteHandle.from_text(text)
with kvzc.Engine(allow_users=[int(each) for each in allow], default_timeout=10) as engine:
    try:
        engine.put(np.ones(8, np.uint8), handle).wait()
    except kvzc.Error as error:
        print(type(error).__name__, isinstance(error, PermissionError), error)
    else:
        print("done")
"""

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@as_root
@pytest.mark.parametrize("owner_allows", [False, True])
@pytest.mark.parametrize("writer_allows", [False, True])
def test_another_user_is_let_in_only_when_both_sides_name_it(
    owner_allows: bool, writer_allows: bool
) -> None:
    cache = kvzc.empty(8, "uint8")
    allow = [OTHER_USER] if owner_allows else []
    with kvzc.Engine(allow_users=allow) as engine, engine.register(cache) as region:
        ended = run_script(
            STRANGER, region.handle().to_text(), *([str(os.getuid())] if writer_allows else [])
        )
    assert ended.status == 0, ended.errors
    if owner_allows and writer_allows:
        assert ended.output.strip() == "done"
        assert cache.all()
    else:
        assert ended.output.startswith("AccessDenied True")
        assert "allow_users" in ended.output
        assert not cache.any()


@as_root
def test_a_user_may_be_named() -> None:
    import pwd

    cache = kvzc.empty(8, "uint8")
    name = pwd.getpwuid(OTHER_USER).pw_name
    with kvzc.Engine(allow_users=[name]) as engine, engine.register(cache) as region:
        ended = run_script(STRANGER, region.handle().to_text(), str(os.getuid()))
    assert ended.output.strip() == "done", ended.errors
    with pytest.raises((KeyError, ValueError)):
        kvzc.Engine(allow_users=["nobody-has-this-name"])
