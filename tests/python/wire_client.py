"""A peer made by hand, as cpp/WIRE.md describes it: for what no honest engine would do.

Holder connects to an engine with one of its handles; Owner listens, for engines that put to it.
Both then speak as they like: send(), receive(), and the memory that both sides map.
"""

import array
import contextlib
import fcntl
import hashlib
import hmac
import mmap
import os
import pathlib
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import kvzc

HELLO, CHALLENGE, PROOF, WELCOME, REFUSE, ATTACH, STORAGE, ATTACHED, RELEASE, KICK, BYE = range(
    1, 12
)
LIMIT_S = 10.0  # For every single message.
RING_BYTES = 1 << 16
FENCE_SLOTS = 64
OUTBOX_TAIL, OUTBOX_HEAD, OUTBOX_RING = 4096, 4160, 4224
DOORBELL_BYTES = 192
MOST_MESSAGE_BYTES, MOST_FILES = 1 << 16, 32


def varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def blob(data: bytes) -> bytes:
    return varint(len(data)) + data


def prove(key: bytes, role: bytes, session: bytes, grant: int) -> bytes:
    return hmac.digest(key, blob(role) + session + struct.pack("<Q", grant), "sha256")


@dataclass(frozen=True)
class HandleBytes:
    """What a handle says, and handles that say something else."""

    data: bytes

    @classmethod
    def of(cls, handle: kvzc.RemoteHandle) -> "HandleBytes":
        return cls(handle.to_bytes())

    @property
    def incarnation(self) -> bytes:
        return self.data[12:28]

    @property
    def grant(self) -> int:
        return int.from_bytes(self.data[28:36], "little")

    @property
    def key(self) -> bytes:
        return self.data[38:70]

    @property
    def engine(self) -> str:
        return self.data[71 : 71 + self.data[70]].decode()

    def with_grant(self, grant: int) -> "HandleBytes":
        return HandleBytes(_checked(self.data[:28] + struct.pack("<Q", grant) + self.data[36:]))

    def with_key(self, key: bytes) -> "HandleBytes":
        return HandleBytes(_checked(self.data[:38] + key + self.data[70:]))

    def owned_by(self, engine: str, incarnation: bytes) -> "HandleBytes":
        """The same memory and key, in another engine whose name is as long."""
        assert len(engine) == len(self.engine)
        data = self.data[:12] + incarnation + self.data[28:]
        return HandleBytes(_checked(data.replace(self.engine.encode(), engine.encode())))

    @property
    def addresses(self) -> list[tuple[int, str]]:
        """Kind (1 Unix, 2 TCP) and text of each."""
        return self._addresses()[0]

    def reached_at(self, addresses: Sequence[tuple[int, str]]) -> "HandleBytes":
        """The same, but its owner is looked for there."""
        begin, end = self._addresses()[1:]
        new = bytes([len(addresses)])
        for kind, text in addresses:
            new += bytes([kind]) + blob(text.encode())
        data = self.data[:begin] + new + self.data[end:]
        return HandleBytes(_checked(data[:8] + struct.pack("<I", len(data)) + data[12:]))

    def _addresses(self) -> tuple[list[tuple[int, str]], int, int]:
        begin = at = 71 + self.data[70]
        found = []
        for _ in range(self.data[at]):
            kind, nbytes = self.data[at + 1], self.data[at + 2]
            found.append((kind, self.data[at + 3 : at + 3 + nbytes].decode()))
            at += 2 + nbytes
        return found, begin, at + 1

    def handle(self) -> kvzc.RemoteHandle:
        return kvzc.RemoteHandle.from_bytes(self.data)


def _checked(data: bytes) -> bytes:
    return data[:-8] + hashlib.sha256(data[:-8]).digest()[:8]


def address(engine: str) -> bytes:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return f"\0kvzc/{os.getuid()}/{engine}/{hashlib.sha256(boot).hexdigest()[:8]}".encode()


def _memory(nbytes: int) -> int:
    file = os.memfd_create("kvzc-by-hand", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, nbytes)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return file


class Wire:
    """A control connection, and what is the same on both of its sides."""

    def __init__(self, *, arrival_depth: int = 1024) -> None:
        self.arrival_depth = arrival_depth
        self.session = b""
        self.fence_slot = 0
        self._close = contextlib.ExitStack()

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._close.close()

    def use(self, connected: socket.socket) -> None:
        connected.settimeout(LIMIT_S)
        self.socket = self._close.enter_context(connected)

    def send(self, kind: int, body: bytes = b"", files: Sequence[int] = ()) -> None:
        message = struct.pack("<HHI", kind, 0, 8 + len(body)) + body
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        self.socket.sendmsg([message], rights)

    def receive(self) -> tuple[int, bytes, list[int]]:
        """Gives the type, the body and the descriptors, which this object closes."""
        data, files, _, _ = socket.recv_fds(self.socket, MOST_MESSAGE_BYTES, MOST_FILES)
        for file in files:
            self._close.callback(os.close, file)
        if not data:
            raise ConnectionResetError("the engine has ended the connection")
        kind, _, nbytes = struct.unpack_from("<HHI", data)
        assert nbytes == len(data)
        return kind, data[8:], files

    def expect(self, kind: int) -> tuple[bytes, list[int]]:
        """Receives until there is a message of this type; ConnectionError when refused."""
        while True:
            found, body, files = self.receive()
            if found == kind:
                return body, files
            if found in (REFUSE, BYE):
                raise ConnectionRefusedError(body)

    def unread(self) -> int:
        """How many bytes of ours the engine has not read yet."""
        siocoutq = 0x5411
        out = array.array("i", [0])
        fcntl.ioctl(self.socket, siocoutq, out)
        return out[0]

    def offers(self) -> tuple[bytes, list[int]]:
        """Makes our side of the memory that both map: one offer, of shm."""
        files = [
            _memory(OUTBOX_RING + RING_BYTES),
            _memory(DOORBELL_BYTES),
            os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK),
            _memory(8 * FENCE_SLOTS),
        ]
        for file in files:
            self._close.callback(os.close, file)
        self.outbox = self._close.enter_context(mmap.mmap(files[0], OUTBOX_RING + RING_BYTES))
        namespace = os.stat("/proc/self/ns/pid").st_ino
        terms = struct.pack("<IIIQ", RING_BYTES, FENCE_SLOTS, self.arrival_depth, namespace)
        return varint(1) + blob(b"shm") + blob(terms) + bytes([len(files)]), files

    def publish(self, tag: bytes) -> None:
        """Writes one tag into our outbox; there must be room up to the ring's end."""
        (tail,) = struct.unpack_from("<Q", self.outbox, OUTBOX_TAIL)
        record = bytes([len(tag), 0, 0, 0, 0, 0, 0, 0]) + tag + bytes(-len(tag) % 8)
        assert tail + len(record) <= RING_BYTES
        at = OUTBOX_RING + tail
        self.outbox[at : at + len(record)] = record
        struct.pack_into("<Q", self.outbox, OUTBOX_TAIL, tail + len(record))

    def published(self) -> int:
        return int(struct.unpack_from("<Q", self.outbox, OUTBOX_TAIL)[0])

    def consumed(self) -> int:
        """How many bytes of our outbox the engine has taken."""
        return int(struct.unpack_from("<Q", self.outbox, OUTBOX_HEAD)[0])

    def mark_busy(self, fence_slot: int) -> None:
        """Says that this thread is writing through this grant."""
        struct.pack_into("<II", self.outbox, 0, fence_slot + 1, threading.get_native_id())

    def mark_idle(self) -> None:
        struct.pack_into("<Q", self.outbox, 0, 0)

    def ask_attach(self, handle: HandleBytes, request: int = 1) -> None:
        proof = prove(handle.key, b"kvzc attach", self.session, handle.grant)
        self.send(ATTACH, struct.pack("<IQ", request, handle.grant) + proof)

    def attach(self, handle: HandleBytes) -> None:
        """Fetches what writing through the handle takes: fence_slot; the memory is left alone."""
        self.ask_attach(handle)
        body, _ = self.expect(ATTACHED)
        code, text_bytes = body[4], body[5]
        assert code == 0, body
        (self.fence_slot,) = struct.unpack_from("<I", body, 6 + text_bytes + 32)

    def share(self, nbytes: int) -> None:
        """Makes memory of our own and tells the engine of it, as storage 1."""
        file = _memory(nbytes)
        self._close.callback(os.close, file)
        sealed = bytes([1])
        road = blob(b"shm") + bytes([0]) + blob(b"") + blob(sealed) + bytes([1])
        self.send(STORAGE, struct.pack("<QQ", 1, nbytes) + varint(1) + road, [file])

    def answer_attach(self, body: bytes, key: bytes, fence_slot: int = 0) -> None:
        """Grants what an ATTACH asks for; its memory is what was shared before."""
        request, grant = struct.unpack_from("<IQ", body)
        proof = prove(key, b"kvzc attached", self.session, grant)
        fence = struct.pack("<IQ", fence_slot, 0)
        storages = varint(1) + struct.pack("<Q", 1)
        granted = struct.pack("<I", request) + bytes([0]) + blob(b"") + proof + fence + storages
        self.send(ATTACHED, granted)


class Holder(Wire):
    """Connects to the engine behind a handle, up to its WELCOME."""

    def __init__(
        self,
        handle: kvzc.RemoteHandle,
        *,
        name: bytes = b"by hand",
        incarnation: bytes | None = None,
        arrival_depth: int = 1024,
    ) -> None:
        super().__init__(arrival_depth=arrival_depth)
        self.given = HandleBytes.of(handle)
        self.incarnation = incarnation or os.urandom(16)
        self.name = name

    def __enter__(self) -> "Holder":
        try:
            self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def _connect(self) -> None:
        given = self.given
        self.use(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self.socket.connect(address(given.engine))
        body = b"KVZC" + struct.pack("<HH", 1, 1) + self.incarnation + given.incarnation
        body += os.urandom(32) + struct.pack("<Q", given.grant) + blob(self.name)
        self.send(HELLO, body)
        challenge, _ = self.expect(CHALLENGE)
        hello = struct.pack("<HHI", HELLO, 0, 8 + len(body)) + body
        self.session = hashlib.sha256(hello + challenge[2:34]).digest()
        assert challenge[34:66] == prove(given.key, b"kvzc owner", self.session, given.grant)
        offers, files = self.offers()
        self.send(
            PROOF, prove(given.key, b"kvzc holder", self.session, given.grant) + offers, files
        )
        self.expect(WELCOME)


class Owner(Wire):
    """Listens under a name; accept() takes one engine in, up to our WELCOME."""

    def __init__(self, engine: str, *, arrival_depth: int = 1024) -> None:
        super().__init__(arrival_depth=arrival_depth)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener = self._close.enter_context(listener)
        self._listener.settimeout(LIMIT_S)
        self._listener.bind(address(engine))
        self._listener.listen()

    def hear(self) -> bytes:
        """Accepts a connection and gives its HELLO, header and all."""
        self.use(self._listener.accept()[0])
        return self.socket.recv(MOST_MESSAGE_BYTES)

    def accept(self, given: HandleBytes) -> None:
        """Takes in who connects with this handle."""
        nonce = os.urandom(32)
        self.session = hashlib.sha256(self.hear() + nonce).digest()
        proof = prove(given.key, b"kvzc owner", self.session, given.grant)
        self.send(CHALLENGE, struct.pack("<H", 1) + nonce + proof + blob(given.engine.encode()))
        self.expect(PROOF)
        offers, files = self.offers()
        self.send(WELCOME, offers, files)
