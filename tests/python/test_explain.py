"""explain(): which transport, which way, and why no better one."""

import re

import kvzc
import numpy as np
import pytest
from helpers import Peer, State


def own(state: State, is_mapped: bool) -> str:
    state.engine = kvzc.Engine(default_timeout=20)
    state.cache = kvzc.empty(64, "uint8") if is_mapped else np.zeros(64, np.uint8)
    state.region = state.engine.register(state.cache)
    text: str = state.region.handle().to_text()
    return text


@pytest.mark.parametrize(
    ("is_mapped", "way"), [(True, "shm: mapped"), (False, r"shm: private.*kvzc\.empty")]
)
def test_the_way_is_told_and_what_would_be_faster(
    engine: kvzc.Engine, peer: Peer, is_mapped: bool, way: str
) -> None:
    handle = kvzc.RemoteHandle.from_text(peer.call(own, is_mapped))
    assert engine.stats()["peers"] == 0
    words = engine.explain(handle)  # Reaches the peer by itself.
    assert engine.stats()["peers"] == 1
    (first, second, *rest) = words.splitlines()
    assert f"pid {peer.pid}" in first
    assert re.match(way, second), second
    # What is better is named with the reason, what is worse is not.
    assert [line.split(":")[0] for line in rest] == ["not ascend"]


def test_each_storage_of_a_group_is_told_once(engine: kvzc.Engine) -> None:
    group = {"k": kvzc.empty(8, "uint8"), "v": kvzc.empty(8, "uint8"), "s": np.zeros(8, np.uint8)}
    with kvzc.Engine() as owner, owner.register(group) as region:
        lines = engine.explain(region.handle()).splitlines()
    ways = [line for line in lines if line.startswith("shm:")]
    assert len(ways) == 2 and "mapped" in ways[0] and "in this very process" in ways[1]


def test_a_handle_that_leads_nowhere_is_an_error(engine: kvzc.Engine) -> None:
    with kvzc.Engine() as owner, owner.register(np.zeros(8, np.uint8)) as region:
        handle = region.handle()
    with pytest.raises(kvzc.PeerLost):
        engine.explain(handle)


def test_the_module_explains_as_the_engine_does() -> None:
    with kvzc.Engine() as owner, owner.register(np.zeros(8, np.uint8)) as region:
        handle = region.handle()
        assert kvzc.explain(handle) == kvzc.default_engine().explain(handle)
        assert "shm: " in kvzc.explain(handle)
