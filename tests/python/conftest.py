"""Set-up that the Python tests share."""

import os
from collections.abc import Iterator

import hypothesis
import kvzc
import pytest
from helpers import Peer

hypothesis.settings.register_profile(
    "kvzc",
    deadline=None,
    max_examples=100,
    derandomize="CI" in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("kvzc")


@pytest.fixture
def engine() -> Iterator[kvzc.Engine]:
    """An engine of its own for one test."""
    with kvzc.Engine(default_timeout=10) as made:
        yield made


@pytest.fixture
def peer() -> Iterator[Peer]:
    """A process that the test may also kill."""
    with Peer() as made:
        yield made


@pytest.fixture(scope="module")
def shared_peer() -> Iterator[Peer]:
    """A process that the tests of a file share, because starting one takes a second."""
    with Peer() as made:
        yield made
