"""Engines that meet over a network: who may, what they are told when they may not.

No transport of this machine reaches another host, so here a connection that is allowed ends with
TransportUnavailable; tests/softroce moves bytes.
"""

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator

import kvzc
import numpy as np
import pytest
from wire_client import HandleBytes

TCP = 2
SECRET = "sixteen bytes or more"


REGIONS: list[kvzc.Region] = []  # Open as long as their owner.


@pytest.fixture
def owner() -> Iterator[kvzc.Engine]:
    with kvzc.Engine(transports=["shm"], listen="127.0.0.1:0", secret=SECRET) as engine:
        yield engine
    REGIONS.clear()


def remote(engine: kvzc.Engine, *before: str) -> kvzc.RemoteHandle:
    """A handle whose owner is on another host, for all that it says."""
    REGIONS.append(engine.register(np.zeros(64, np.uint8)))
    bytes_of = HandleBytes.of(REGIONS[-1].handle())
    return bytes_of.reached_at([(TCP, each) for each in (*before, *engine.addresses)]).handle()


def put(handle: kvzc.RemoteHandle, **options: object) -> None:
    with kvzc.Engine(transports=["shm"], **options) as engine:  # type: ignore[arg-type]
        engine.put(np.ones(64, np.uint8), handle).wait(10)


def listening_ports() -> set[int]:
    """Of this process."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").rstrip("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as lines:
            for line in list(lines)[1:]:
                field = line.split()
                if field[3] == "0A" and field[9] in inodes:
                    found.add(int(field[1].rsplit(":", 1)[1], 16))
    return found


def test_no_port_is_open_unless_asked_for() -> None:
    before = listening_ports()
    with kvzc.Engine(secret=SECRET) as engine:
        assert engine.addresses == []
        assert listening_ports() == before
        (unix,) = HandleBytes.of(engine.register(np.zeros(1, np.uint8)).handle()).addresses
        assert unix[0] == 1
    with kvzc.Engine(listen="127.0.0.1:0", secret=SECRET) as engine:
        (address,) = engine.addresses
        assert listening_ports() - before == {int(address.rsplit(":", 1)[1])}
    assert listening_ports() == before


def test_a_handle_names_the_host_and_where_others_reach_it() -> None:
    with kvzc.Engine(listen="127.0.0.1:0", advertise="192.0.2.7:0", secret=SECRET) as engine:
        (address,) = engine.addresses
        host, port = address.rsplit(":", 1)
        assert host == "192.0.2.7" and int(port) in listening_ports()
        handle = engine.register(np.zeros(1, np.uint8)).handle()
        assert (TCP, address) in HandleBytes.of(handle).addresses
        assert "192.0.2.7" not in repr(handle)  # A log gives nothing away.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"listen": "127.0.0.1:0"}, r"needs a secret"),
        ({"listen": "127.0.0.1:0", "secret": "short"}, r"5 bytes.*at least 16"),
        ({"secret": b"fifteen bytes.."}, r"15 bytes"),
        ({"listen": "7000", "secret": SECRET}, r"host:port"),
        ({"listen": "192.0.2.1:0", "secret": SECRET}, r"no address of this host.*advertise"),
        ({"listen": "127.0.0.1:0", "secret": SECRET, "advertise": "x"}, r"host:port"),
        ({"advertise": "127.0.0.1:0", "secret": SECRET}, r"listen="),
        ({"listen": "127.0.0.1:0", "secret": SECRET, "advertise": "0.0.0.0:7"}, r"is none; omit"),
        ({"peer_timeout": 1}, r"2 to 3600"),
        ({"secret": ""}, r"omit it"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kvzc.Engine(**options)  # type: ignore[arg-type]


def sockets_of_this_process() -> Iterator[socket.socket]:
    """Duplicates of them, each open until the next is asked for."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:
                yield each


def silence_that_is_borne(**options: object) -> list[int]:
    """How the kernel was told to look after a connection to an engine with these options."""
    tcp = socket.IPPROTO_TCP
    with kvzc.Engine(listen="127.0.0.1:0", secret=SECRET, **options) as engine:  # type: ignore[arg-type]
        host, port = engine.addresses[0].rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=10) as client:
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                for each in sockets_of_this_process():
                    try:
                        if each.getpeername() != client.getsockname():
                            continue
                    except OSError:  # Nobody is at its other end.
                        continue
                    if not each.getsockopt(tcp, socket.TCP_USER_TIMEOUT):
                        continue  # It was accepted this very moment.
                    return [
                        each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                        each.getsockopt(tcp, socket.TCP_KEEPIDLE),
                        each.getsockopt(tcp, socket.TCP_KEEPINTVL),
                        each.getsockopt(tcp, socket.TCP_KEEPCNT),
                        each.getsockopt(tcp, socket.TCP_USER_TIMEOUT),
                    ]
    raise AssertionError("the engine has not taken the connection")


def test_a_silent_host_is_lost_after_five_seconds_unless_told_otherwise() -> None:
    borne = silence_that_is_borne()
    assert borne == silence_that_is_borne(peer_timeout=5)
    assert borne[0] == 1
    # The last probe goes out, and is given up, within the five seconds.
    idle, interval, count, give_up_ms = borne[1:]
    assert idle + interval * count <= 5
    assert 3000 <= give_up_ms <= 5000
    assert silence_that_is_borne(peer_timeout=60)[1:] > borne[1:]


def test_a_port_that_is_taken_is_named(owner: kvzc.Engine) -> None:
    (address,) = owner.addresses
    with pytest.raises(kvzc.InvalidArgument, match=address):
        kvzc.Engine(listen=address, secret=SECRET)


def test_who_has_the_secret_is_let_in(owner: kvzc.Engine) -> None:
    # All that is missing is a transport: the secret and the key were right.
    with pytest.raises(kvzc.TransportUnavailable, match=r"between two hosts.*kvzc info"):
        put(remote(owner), secret=SECRET.encode())


def test_who_has_no_secret_or_another_is_not(owner: kvzc.Engine) -> None:
    handle = remote(owner)
    with pytest.raises(kvzc.AccessDenied, match=r"Engine\(secret="):
        put(handle)
    with pytest.raises(kvzc.AccessDenied, match=r"another secret"):
        put(handle, secret="another secret of as many bytes")


def test_a_forged_key_is_not_told_from_a_wrong_secret(owner: kvzc.Engine) -> None:
    forged = HandleBytes.of(remote(owner)).with_key(b"k" * 32).handle()
    with pytest.raises(kvzc.AccessDenied, match=r"another secret.*or does not know"):
        put(forged, secret=SECRET)


def test_an_owner_that_lost_the_secret_is_not_believed(owner: kvzc.Engine) -> None:
    """Whoever took over the address and listens there is not told anything that proves."""
    handle = remote(owner)
    (address,) = owner.addresses
    owner.close()
    with (
        kvzc.Engine(listen=address, secret="some other secret here") as other,
        kvzc.Engine(secret=SECRET) as writer,
        pytest.raises((kvzc.StaleHandle, kvzc.AccessDenied)),
    ):
        assert other.addresses == [address]
        writer.put(np.ones(64, np.uint8), handle).wait(10)


def test_addresses_are_tried_in_order_and_all_reasons_told(owner: kvzc.Engine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dead = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(kvzc.TransportUnavailable):
        put(remote(owner, dead), secret=SECRET)
    handle = HandleBytes.of(remote(owner)).reached_at([(TCP, dead), (1, "kvzc/nobody")]).handle()
    with pytest.raises(kvzc.PeerLost, match=rf"nobody listens at {dead}.*kvzc/nobody"):
        put(handle, secret=SECRET)


def test_an_address_where_another_engine_answers_is_passed_over(owner: kvzc.Engine) -> None:
    """A bridge has the same address on every host, and there the holder's own engine may listen."""
    with (
        kvzc.Engine(transports=["shm"], listen="127.0.0.1:0", secret=SECRET) as other,
        kvzc.Engine(transports=["shm"], listen="127.0.0.1:0", secret=SECRET[::-1]) as stranger,
        socket.create_server(("127.0.0.1", 0)) as web,
    ):

        def answer() -> None:
            with contextlib.suppress(OSError), web.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        noise = f"127.0.0.1:{web.getsockname()[1]}"
        with pytest.raises(kvzc.TransportUnavailable, match=r"between two hosts"):
            put(remote(owner, *other.addresses, noise, *stranger.addresses), secret=SECRET)
        alone = HandleBytes.of(remote(owner)).reached_at([(TCP, other.addresses[0])]).handle()
        with pytest.raises(kvzc.StaleHandle):
            put(alone, secret=SECRET)


def test_a_stranger_at_one_address_is_no_last_word_while_another_is_silent(
    owner: kvzc.Engine,
) -> None:
    """The network was away for a moment, and meanwhile only the bridge's address answered."""
    with (
        kvzc.Engine(transports=["shm"], listen="127.0.0.1:0", secret=SECRET) as other,
        kvzc.Engine(transports=["shm"], secret=SECRET) as writer,
    ):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        handle = remote(owner)
        handle = (
            HandleBytes.of(handle)
            .reached_at([(TCP, other.addresses[0]), (TCP, f"127.0.0.1:{port}")])
            .handle()
        )
        with pytest.raises(kvzc.StaleHandle, match=r"nobody listens"):
            writer.put(np.ones(64, np.uint8), handle).wait(10)
        with socket.create_server(("127.0.0.1", port)) as back:

            def pass_on() -> None:
                host, inner = owner.addresses[0].rsplit(":", 1)
                with contextlib.suppress(OSError):
                    outside = back.accept()[0]
                    inside = socket.create_connection((host, int(inner)))
                    threading.Thread(target=pump, args=(inside, outside), daemon=True).start()
                    pump(outside, inside)

            def pump(source: socket.socket, target: socket.socket) -> None:
                with contextlib.suppress(OSError), source, target:
                    while chunk := source.recv(65536):
                        target.sendall(chunk)

            thread = threading.Thread(target=pass_on)
            thread.start()
            with pytest.raises(kvzc.TransportUnavailable, match=r"between two hosts"):
                end = time.monotonic() + 10
                while True:
                    try:
                        writer.put(np.ones(64, np.uint8), handle).wait(10)
                    except kvzc.StaleHandle:
                        if time.monotonic() > end:
                            raise
                        time.sleep(0.1)
            thread.join()


def test_a_handle_on_its_own_host_goes_by_the_kernel(owner: kvzc.Engine) -> None:
    region = owner.register(kvzc.empty(64, "uint8"))
    with kvzc.Engine(transports=["shm"]) as writer:  # It knows no secret, and needs none.
        assert writer.connect(region.handle()).address is None


def test_a_silent_address_leaves_time_for_the_next(owner: kvzc.Engine) -> None:
    # It accepts into its queue and says nothing; a full queue drops what comes.
    with socket.create_server(("127.0.0.1", 0), backlog=1) as silent:
        port = silent.getsockname()[1]
        full = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(("127.0.0.1", port))
            full.append(filler)
        began = time.monotonic()
        with pytest.raises(kvzc.TransportUnavailable):
            put(remote(owner, f"127.0.0.1:{port}"), secret=SECRET, connect_timeout=4)
        assert time.monotonic() - began < 4
        for filler in full:
            filler.close()


def test_an_address_that_accepts_and_says_nothing_leaves_time_too(owner: kvzc.Engine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        handle = remote(owner, f"127.0.0.1:{mute.getsockname()[1]}")
        with pytest.raises(kvzc.TransportUnavailable, match=r"between two hosts"):
            put(handle, secret=SECRET, connect_timeout=4)


def test_noise_and_floods_on_the_port_disturb_nobody(owner: kvzc.Engine) -> None:
    host, port = owner.addresses[0].rsplit(":", 1)
    over = threading.Event()
    random = np.random.default_rng(3)

    def disturb() -> None:
        kept: list[socket.socket] = []
        while not over.is_set():
            with contextlib.suppress(OSError):
                noise = socket.create_connection((host, int(port)), timeout=1)
                kept.append(noise)
                noise.sendall(random.bytes(int(random.integers(0, 300))))
            if len(kept) > 200:  # More than it keeps half open.
                kept.pop(0).close()
        for each in kept:
            each.close()

    threads = [threading.Thread(target=disturb) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        local = owner.register(kvzc.empty(64, "uint8"))
        with kvzc.Engine(transports=["shm"]) as writer:
            for i in range(50):
                writer.put(np.full(64, i, np.uint8), local.handle()).wait(10)
        with pytest.raises(kvzc.TransportUnavailable):
            put(remote(owner), secret=SECRET)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert owner.stats()["peers"] == 0


def test_a_message_as_long_as_memory_is_refused_at_its_header(owner: kvzc.Engine) -> None:
    host, port = owner.addresses[0].rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(bytes([1, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0x7F]))
        assert connection.recv(1) == b""
