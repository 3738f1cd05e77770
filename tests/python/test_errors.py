"""One exception class per cause, each also the built-in that a Python programmer would catch."""

import re
from pathlib import Path

import kvzc
import pytest

HEADER = Path(__file__).resolve().parents[2] / "cpp" / "include" / "kvzc" / "status.h"

PROMISED = {
    "InvalidArgument": ValueError,
    "OutOfRange": IndexError,
    "LayoutMismatch": ValueError,
    "BadHandle": ValueError,
    "NotRegistered": ValueError,
    "StaleHandle": ConnectionError,
    "Revoked": PermissionError,
    "AccessDenied": PermissionError,
    "TimedOut": TimeoutError,
    "WouldBlock": BlockingIOError,
    "PeerLost": ConnectionError,
    "Cancelled": RuntimeError,
    "Closed": RuntimeError,
    "TransportUnavailable": RuntimeError,
    "Unsupported": NotImplementedError,
    "LimitExceeded": OSError,
    "ForkedEngine": RuntimeError,
    "ProtocolError": ConnectionError,
    "SystemFailure": OSError,
}


@pytest.mark.parametrize("name", PROMISED)
def test_an_error_is_a_kvzc_error_and_the_built_in(name: str) -> None:
    error = getattr(kvzc, name)
    assert issubclass(error, kvzc.Error)
    assert issubclass(error, PROMISED[name])
    assert error.__module__ == "kvzc"
    assert error.__doc__
    assert name in kvzc.__all__


def test_the_core_has_no_other_errors() -> None:
    listed = re.findall(r"X\(k\w+, (\w+), (\w+)\)", HEADER.read_text())
    assert {name: builtin.__name__ for name, builtin in PROMISED.items()} == dict(listed)


def test_the_text_says_what_was_asked_and_what_is_allowed(engine: kvzc.Engine) -> None:
    cache = kvzc.empty((4, 8), "float32")
    with engine.register(cache) as region:
        with pytest.raises(kvzc.OutOfRange, match=r"index 4 .*axis 0 of size 4"):
            region[4]
        with pytest.raises(kvzc.LayoutMismatch, match=r"float32\[2, 8\].*float32\[3, 8\]"):
            engine.put(cache[:2], region.handle()[:3])
        with pytest.raises(kvzc.InvalidArgument, match=r"241.*240"):
            engine.put(cache, region.handle(), notify=b"x" * 241)
