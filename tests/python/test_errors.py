"""One exception class per cause, each also the built-in that a Python programmer would catch."""

import os
import re
import runpy
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import kvzc
import numpy as np
import pytest
from wire_client import HandleBytes

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "cpp" / "include" / "kvzc" / "status.h"

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


def test_the_table_in_the_docs_is_of_this_version() -> None:
    table = runpy.run_path(str(ROOT / "tools" / "make_errors.py"))["table"]()
    assert (ROOT / "docs" / "errors.md").read_text() == table, "run `make docs`"


# --- Each of them, raised. Two engines, and a handle of 64 bytes. ---

ONES = np.ones(64, np.uint8)
Case = Callable[[kvzc.Engine, kvzc.Engine, kvzc.Region], None]


def put(engine: kvzc.Engine, handle: kvzc.RemoteView, **options: object) -> None:
    engine.put(ONES, handle, **options).wait(20)  # type: ignore[arg-type]


def stale(_: kvzc.Engine, writer: kvzc.Engine, __: kvzc.Region) -> None:
    with kvzc.Engine("comes-back") as first, first.register(ONES.copy()) as region:
        old = kvzc.RemoteHandle.from_bytes(region.handle().to_bytes())
    with kvzc.Engine("comes-back"):
        put(writer, old)


def revoked(_: kvzc.Engine, writer: kvzc.Engine, region: kvzc.Region) -> None:
    grant = region[:].grant()
    handle = grant.handle()
    grant.revoke(timeout=20)
    put(writer, handle)


def timed_out(_: kvzc.Engine, __: kvzc.Engine, region: kvzc.Region) -> None:
    with kvzc.Engine(faults=kvzc.Faults(completion_loss=1.0)) as engine:
        transfer = engine.put(ONES, region.handle())
        try:
            transfer.wait(0.01)
        finally:
            transfer.cancel(20)


def would_block(_: kvzc.Engine, writer: kvzc.Engine, region: kvzc.Region) -> None:
    with kvzc.CompletionQueue(1) as queue:
        for _ in range(2):
            put(writer, region.handle(), queue=queue, accept_timeout=0)


def peer_lost(_: kvzc.Engine, writer: kvzc.Engine, __: kvzc.Region) -> None:
    with kvzc.Engine() as other, other.register(ONES.copy()) as region:
        handle = region.handle()
    put(writer, handle)


def closed(_: kvzc.Engine, __: kvzc.Engine, region: kvzc.Region) -> None:
    engine = kvzc.Engine()
    engine.close()
    put(engine, region.handle())


def strict(_: kvzc.Engine, __: kvzc.Engine, region: kvzc.Region) -> None:
    with kvzc.Engine(strict=True) as engine:
        put(engine, region.handle())


def forked(_: kvzc.Engine, writer: kvzc.Engine, region: kvzc.Region) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            put(writer, region.handle())
        except kvzc.ForkedEngine:
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    raise kvzc.ForkedEngine("in the child: this engine was made before fork()")


def protocol(_: kvzc.Engine, writer: kvzc.Engine, region: kvzc.Region) -> None:
    """Whoever listens there is not kvzc."""
    unix, name = 1, f"kvzc-test-{os.getpid()}-errors"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(b"\0" + name.encode())
        listener.listen()

        def babble() -> None:
            connection = listener.accept()[0]
            with connection:
                connection.recv(65536)
                connection.send(b"HTTP/1.1 400 Bad Request")
                connection.recv(65536)

        thread = threading.Thread(target=babble)
        thread.start()
        try:
            put(writer, HandleBytes.of(region.handle()).reached_at([(unix, name)]).handle())
        finally:
            thread.join(20)


CASES: dict[str, Case] = {
    "InvalidArgument": lambda o, w, r: put(w, r.handle(), notify=b"x" * 241),
    "OutOfRange": lambda o, w, r: put(w, r.handle()[64:65][0]),
    "LayoutMismatch": lambda o, w, r: put(w, r.handle()[:63]),
    "BadHandle": lambda o, w, r: put(w, kvzc.RemoteHandle.from_text("kvzc1.AAAA")),
    "NotRegistered": strict,
    "StaleHandle": stale,
    "Revoked": revoked,
    "AccessDenied": lambda o, w, r: put(w, r[:].grant(access="get").handle()),
    "TimedOut": timed_out,
    "WouldBlock": would_block,
    "PeerLost": peer_lost,
    "Cancelled": lambda o, w, r: put(w, r.handle(), deadline=0),
    "Closed": closed,
    "TransportUnavailable": lambda o, w, r: kvzc.Engine(transports=["ascend"]).close(),
    "Unsupported": lambda o, w, r: o.empty((8,), "uint8", device="npu:0"),
    "LimitExceeded": lambda o, w, r: o.empty((1 << 60,), "uint8"),
    "ForkedEngine": forked,
    "ProtocolError": protocol,
    "SystemFailure": lambda o, w, r: failing_put(r),
}


def failing_put(region: kvzc.Region) -> None:
    with kvzc.Engine(faults=kvzc.Faults(post_failure=1.0)) as engine:
        put(engine, region.handle())


@pytest.mark.parametrize("name", PROMISED)
def test_each_is_raised_and_says_something(name: str) -> None:
    with (
        kvzc.Engine() as owner,
        kvzc.Engine() as writer,
        owner.register(np.zeros(64, np.uint8)) as region,
        pytest.raises(getattr(kvzc, name)) as raised,
    ):
        CASES[name](owner, writer, region)
    assert len(str(raised.value)) > 20
    assert type(raised.value) is getattr(kvzc, name)
