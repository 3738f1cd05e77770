"""A child's end of the two pipes to its parent: commands on stdin, events on stdout, JSON lines.

A child ends when its parent does: the parent's end closes the child's stdin, and that is seen at
once, whatever the child is doing.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

from kvzc.demo.job import Job

_ORPHANED = 3
_JOB_TIMEOUT_S = 60.0


class ParentSilent(TimeoutError):
    """The parent sent no command in time."""


class Channel:
    """Sends events to the parent and receives its commands."""

    def __init__(self) -> None:
        # The pipe moves to a descriptor of its own and stdout becomes stderr: a library that
        # prints cannot break the lines.
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="demo-commands", daemon=True).start()

    def send(self, event: str, **fields: Any) -> None:
        """Sends one event."""
        try:
            self._out.write(json.dumps({"event": event, **fields}) + "\n")
            self._out.flush()
        except BrokenPipeError:
            os._exit(_ORPHANED)

    def progress(self, doing: str) -> None:
        """Says what this process does from now on."""
        self.send("progress", doing=doing)

    def receive(self, command: str, timeout_s: float) -> dict[str, Any]:
        """The next command's fields. Raises ParentSilent, or RuntimeError for another command."""
        try:
            fields = self._commands.get(timeout=timeout_s)
        except queue.Empty:
            raise ParentSilent(f"no {command!r} from the parent in {timeout_s:g} s") from None
        if fields["command"] != command:
            raise RuntimeError(f"expected {command!r} from the parent, got {fields['command']!r}")
        return fields

    def _listen(self) -> None:
        # Reads the descriptor and not sys.stdin, whose lock a daemon thread would hold at exit.
        rest = b""
        while chunk := os.read(0, 1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._commands.put(json.loads(line))
        os._exit(_ORPHANED)


def serve(work: Callable[[Channel, Job], None]) -> None:
    """Runs a child: receives the job, does ``work``, waits for the command to exit.

    An exception is sent to the parent as an event instead of a traceback.
    """
    import torch

    channel = Channel()
    try:
        job = Job.from_json(channel.receive("job", _JOB_TIMEOUT_S)["job"])
        torch.set_num_threads(job.threads)
        work(channel, job)
        channel.progress("done")
        channel.receive("exit", job.timeout_s)
    except Exception as error:
        channel.send("error", name=type(error).__name__, text=str(error))
        sys.exit(1)
