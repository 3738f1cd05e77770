"""What the processes of two guests and their driver tell each other: small files in one folder.

The folder is this machine's, shared with both guests; a file appears whole or not at all.
"""

import os
import time
from pathlib import Path

import kvzc

PEER_TIMEOUT_S = 4


class Notes:
    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def write(self, name: str, text: str = "") -> None:
        draft = self.folder / f".{name}.{os.getpid()}"
        draft.write_text(text)
        draft.rename(self.folder / name)

    def read(self, name: str, timeout_s: float = 120) -> str:
        """Waits for it."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            # Listed, not opened: a guest remembers for a while that a file was not there.
            if name in os.listdir(self.folder):
                return (self.folder / name).read_text()
            time.sleep(0.05)
        raise TimeoutError(f"no note '{name}' in {timeout_s:g} s")


def engine(listen: str | None = None) -> kvzc.Engine:
    return kvzc.Engine(
        transports=["rdma"],
        listen=listen,
        secret="the secret of two guests",
        peer_timeout=PEER_TIMEOUT_S,
        connect_timeout=8,
        # All devices but one lead nowhere: each is its guest's own, with the same addresses.
        default_timeout=60,
    )
