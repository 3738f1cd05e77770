"""What is said to whom before the key is proven, and after: by peers that only listen."""

import hashlib
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import kvzc
import numpy as np
import pytest
from wire_client import (
    ATTACH,
    ATTACHED,
    CHALLENGE,
    HELLO,
    PROOF,
    STORAGE,
    WELCOME,
    HandleBytes,
    Holder,
    Owner,
    Wire,
    address,
    blob,
    prove,
)

ONES = np.ones(64, np.uint8)


class Heard(list[tuple[int, bytes, int]]):
    """Type, body and number of descriptors of each message that came from an engine."""

    def kinds(self) -> list[int]:
        return [kind for kind, _, _ in self]

    def files(self) -> int:
        return sum(count for _, _, count in self)

    def has(self, data: bytes) -> bool:
        return any(data in body for _, body, _ in self)


class Listening(Wire):
    """Keeps what it hears."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.heard = Heard()

    def receive(self) -> tuple[int, bytes, list[int]]:
        kind, body, files = super().receive()
        self.heard.append((kind, body, len(files)))
        return kind, body, files


class ListeningHolder(Listening, Holder):
    pass


class ListeningOwner(Listening, Owner):
    def hear(self) -> bytes:
        self.use(self._listener.accept()[0])
        kind, body, _ = self.receive()
        return struct.pack("<HHI", kind, 0, 8 + len(body)) + body

    def hear_the_rest(self) -> None:
        """Up to the end of the connection."""
        while True:
            try:
                self.receive()
            except ConnectionError:
                return


@pytest.fixture
def region(engine: kvzc.Engine) -> Iterator[kvzc.Region]:
    with engine.register(kvzc.empty((4, 64), "uint8")) as made:
        yield made


def test_an_owner_never_says_the_key_and_gives_no_descriptor_before_it_is_proven(
    region: kvzc.Region,
) -> None:
    given = HandleBytes.of(region.handle())
    with ListeningHolder(region.handle()) as holder:
        assert holder.heard.kinds()[:2] == [CHALLENGE, WELCOME]
        assert holder.heard[0][2] == 0
        assert holder.heard[1][2] > 0  # It is proven now, on both sides.
        other = region[1:3].grant()
        holder.attach(given)
        holder.attach(HandleBytes.of(other.handle()))
        assert not holder.heard.has(given.key)
        assert not holder.heard.has(HandleBytes.of(other.handle()).key)


def test_an_owner_gives_nothing_to_who_does_not_prove_the_key(region: kvzc.Region) -> None:
    given = HandleBytes.of(region.handle())
    stranger = ListeningHolder(given.with_key(bytes(32)).handle())
    stranger.use(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    stranger.socket.connect(address(given.engine))
    body = b"KVZC" + struct.pack("<HH", 1, 1) + os.urandom(16) + given.incarnation
    body += os.urandom(32) + struct.pack("<Q", given.grant) + blob(b"stranger")
    stranger.send(HELLO, body)
    challenge, _ = stranger.expect(CHALLENGE)
    hello = struct.pack("<HHI", HELLO, 0, 8 + len(body)) + body
    session = hashlib.sha256(hello + challenge[2:34]).digest()
    offers, files = stranger.offers()
    guess = prove(bytes(32), b"kvzc holder", session, given.grant)
    stranger.send(PROOF, guess + offers, files)
    with pytest.raises(ConnectionError):
        stranger.expect(WELCOME)
    assert stranger.heard.files() == 0
    assert WELCOME not in stranger.heard.kinds()
    assert not stranger.heard.has(given.key)
    stranger.close()


def made_up_owner(region: kvzc.Region) -> HandleBytes:
    """A handle that leads to a listener of ours."""
    given = HandleBytes.of(region.handle())
    name = f"heard-{os.getpid()}".ljust(len(given.engine), "-")[: len(given.engine)]
    return given.owned_by(name, os.urandom(16))


def test_a_holder_never_says_the_key_and_gives_no_descriptor_before_it_is_proven(
    region: kvzc.Region,
) -> None:
    given = made_up_owner(region)
    with ListeningOwner(given.engine) as owner, kvzc.Engine(default_timeout=10) as engine:
        transfer = engine.put(ONES, given.handle()[0])
        owner.accept(given)
        assert owner.heard.kinds() == [HELLO, PROOF]
        assert owner.heard[0][2] == 0
        assert owner.heard[1][2] > 0  # We have proven the key before.
        owner.share(4 * 64)
        owner.answer_attach(owner.expect(ATTACH)[0], given.key)
        transfer.wait()
        assert not owner.heard.has(given.key)


def test_a_holder_gives_nothing_to_who_does_not_prove_the_key(region: kvzc.Region) -> None:
    given = made_up_owner(region)
    with ListeningOwner(given.engine) as owner, kvzc.Engine(default_timeout=10) as engine:
        transfer = engine.put(ONES, given.handle()[0])
        nonce = os.urandom(32)
        session = hashlib.sha256(owner.hear() + nonce).digest()
        guess = prove(bytes(32), b"kvzc owner", session, given.grant)
        owner.send(CHALLENGE, struct.pack("<H", 1) + nonce + guess + blob(given.engine.encode()))
        owner.hear_the_rest()
        assert PROOF not in owner.heard.kinds()
        assert owner.heard.files() == 0
        assert not owner.heard.has(given.key)
        with pytest.raises(kvzc.Error):
            transfer.wait()


def test_a_storage_is_said_once_however_many_grants_of_it_are_used(region: kvzc.Region) -> None:
    with ListeningHolder(region.handle()) as holder:
        grants = [region[i].grant() for i in range(4)]
        for handle in (region.handle(), *(grant.handle() for grant in grants)):
            holder.attach(HandleBytes.of(handle))
        assert holder.heard.kinds().count(ATTACHED) == 5
        assert holder.heard.kinds().count(STORAGE) == 1
