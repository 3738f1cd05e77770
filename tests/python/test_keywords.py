"""put(), get() and what is like them, called in every way that Python has."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import weakref
from collections.abc import Callable

import kvzc
import numpy as np
import pytest

Pair = tuple[kvzc.Engine, kvzc.Region, kvzc.RemoteHandle]


@pytest.fixture
def pair(engine: kvzc.Engine) -> Pair:
    region = engine.register(engine.empty((8,), "uint8"))
    return engine, region, kvzc.RemoteHandle.from_text(region.handle().to_text())


def test_keywords_mean_what_they_name(pair: Pair) -> None:
    engine, _, target = pair
    source = np.arange(8, dtype=np.uint8)
    queue = kvzc.CompletionQueue(4)
    engine.put(source, target, queue=queue, label="mine", notify=b"tag", deadline=9).wait(9)
    assert engine.arrivals.wait(b"tag", timeout=9).tag == b"tag"
    (ended,) = queue.wait(timeout=9)
    assert ended.label == "mine"
    out = np.zeros(8, np.uint8)
    engine.get(out, target, label="back", after=kvzc.NOW).wait(9)
    assert out.tolist() == source.tolist()


def test_names_that_are_not_interned_are_found_too(pair: Pair) -> None:
    engine, _, target = pair
    name = "".join(["no", "tify"])
    engine.put(np.zeros(8, np.uint8), target, **{name: b"by a name made here"}).wait(9)
    assert engine.arrivals.wait(b"by a name made here", timeout=9)


def test_what_is_given_by_position_may_be_named(pair: Pair) -> None:
    engine, _, target = pair
    engine.put(target=target, source=np.full(8, 7, np.uint8), notify=b"named").wait(9)
    assert engine.arrivals.wait(b"named", timeout=9)
    out = np.zeros(8, np.uint8)
    engine.get(out, source=target).wait(9)
    assert out.tolist() == [7] * 8


@pytest.mark.parametrize(
    "call",
    [
        lambda e, s, t: e.put(s, t, notfy=b"misspelt"),
        lambda e, s, t: e.put(s, t, None, b"by position"),
        lambda e, s, t: e.put(s, t, notify="text"),
        lambda e, s, t: e.put(s, t, notify=b"tag", target=t),
        lambda e, s, t: e.put(s, notify=b"tag"),
        lambda e, s, t: e.put(s, s, notify=b"tag"),
        lambda e, s, t: e.put(s, t, deadline="soon"),
        lambda e, s, t: e.put_many([(s, t)], notfy=b"misspelt"),
        lambda e, s, t: type(e).put(s, s, t, notify=b"tag"),
    ],
)
def test_what_does_not_fit_is_a_type_error_that_shows_the_signature(
    pair: Pair, call: Callable[[kvzc.Engine, kvzc.Region, kvzc.RemoteHandle], object]
) -> None:
    engine, region, target = pair
    with pytest.raises(TypeError, match=r"(?s)put(_many)?\(\).*notify: bytes \| None"):
        call(engine, region, target)
    assert engine.arrivals.poll() == []


def test_a_method_is_one(pair: Pair) -> None:
    engine, _, target = pair
    source = np.zeros(8, np.uint8)
    put = functools.partial(engine.put, source, target)
    put(notify=b"partly").wait(9)
    kvzc.Engine.put(engine, source, target, notify=b"unbound").wait(9)
    bound = engine.put
    bound(source, target, notify=b"bound").wait(9)
    assert len(engine.arrivals.poll()) == 3
    for method in (kvzc.Engine.put, kvzc.Engine.get_many, kvzc.Plan.get, kvzc.put, bound):
        assert callable(method)
        assert inspect.isroutine(method)
        assert method.__name__ in ("put", "get_many", "get")
        assert method.__doc__ is not None
        assert method.__doc__.startswith(method.__name__ + "(")
        assert "notify: bytes | None = None" in method.__doc__


def test_a_function_of_the_module_can_be_sent_copied_and_watched() -> None:
    assert pickle.loads(pickle.dumps(kvzc.put)) is kvzc.put
    assert copy.deepcopy(kvzc.get_many) is kvzc.get_many
    assert weakref.ref(kvzc.put)() is kvzc.put
    with pytest.raises(TypeError, match="cannot create"):
        type(kvzc.put)()

    class Other:
        put = kvzc.put

    assert Other().put is kvzc.put


def test_the_module_does_as_the_default_engine() -> None:
    source = np.zeros(8, np.uint8)
    region = kvzc.register(kvzc.empty((8,), "uint8"))
    target = kvzc.RemoteHandle.from_text(region.handle().to_text())
    kvzc.put(source, target, notify=b"module").wait(9)
    kvzc.put_many([(source, target)], notify=b"module").wait(9)
    assert len(kvzc.arrivals.wait(b"module", 2, timeout=9)) == 2
