"""The rdma transport as far as a machine without RDMA devices can show it.

What needs verbs is in tests/softroce, which runs in a guest that has them.
"""

import os
from typing import Any

import kvzc
import pytest
from helpers import run_script

HAS_DEVICES = os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband"))
without_devices = pytest.mark.skipif(HAS_DEVICES, reason="this machine has RDMA devices")


@pytest.mark.parametrize(
    "options",
    [
        {"devices": []},
        {"gid_index": -1},
        {"gid_index": 256},
        {"traffic_class": 256},
        {"service_level": 16},
        {"ack_timeout": 0},
        {"ack_timeout": 32},
        {"retries": 8},
        {"queue_depth": 63},
        {"queue_depth": 8193},
        {"request_bytes": 255},
        {"outstanding_bytes": 1 << 31},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=name):
        kvzc.Rdma(**options)


def test_options_say_which_devices() -> None:
    assert repr(kvzc.Rdma()) == "<kvzc.Rdma all devices>"
    assert repr(kvzc.Rdma(devices=["mlx5_0", "mlx5_1"])) == "<kvzc.Rdma mlx5_0 mlx5_1>"


@without_devices
def test_without_devices_an_explicit_choice_is_refused_with_the_remedy() -> None:
    with pytest.raises(kvzc.TransportUnavailable, match=r"rdma|RDMA|libibverbs"):
        kvzc.Engine(transports=["rdma"])
    with pytest.raises(kvzc.TransportUnavailable):
        kvzc.Engine(transports=["shm", "rdma"])


def test_who_does_not_ask_for_rdma_does_not_load_libibverbs() -> None:
    """So it works where no package brought the library."""
    ended = run_script(
        """
import kvzc
with kvzc.Engine(transports=["shm"]):
    with open("/proc/self/maps") as maps:
        print("libibverbs" in maps.read())
"""
    )
    assert (ended.status, ended.output) == (0, "False\n"), ended.errors
