"""The parent's end: starts the children, listens to all of them at once, and reaps every one."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from kvzc.demo.job import Job

_REAP_TIMEOUT_S = 5.0
_CAUSE_TIMEOUT_S = 0.5


class DemoError(RuntimeError):
    """The demo could not run to its end."""


class ChildDied(DemoError):
    """A process ended before its work did."""


class ChildFailed(DemoError):
    """A process reported an error."""


class ChildSilent(DemoError):
    """A process said nothing for too long."""


class Progress:
    """Lines on stderr, none while things are quick and at most one every ``after_s`` seconds."""

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s
        self._last = time.monotonic()
        self._text = ""

    def note(self, text: str) -> None:
        """Prints ``text`` if nothing was printed for ``after_s`` seconds; with 0, if it is new."""
        now = time.monotonic()
        if now - self._last >= self.after_s and (self.after_s > 0 or text != self._text):
            self._last, self._text = now, text
            print(text, file=sys.stderr, flush=True)


class Child:
    """One child process: what it said that nobody asked for yet, and what it is doing."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self.process = process
        self.doing = "starting"
        self.events: list[dict[str, Any]] = []
        self.dismissed = False
        self.eof = False

    @property
    def pid(self) -> int:
        return self.process.pid


class Crew:
    """All children of one run. A context manager: at its end none is left."""

    def __init__(self, job: Job, progress: Progress) -> None:
        self._job = job
        self._progress = progress
        self._children: list[Child] = []
        self._events: queue.SimpleQueue[tuple[Child, dict[str, Any] | None]] = queue.SimpleQueue()

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def start(self, name: str, python: Sequence[str] = (sys.executable,)) -> Child:
        """Starts a fresh interpreter that runs ``kvzc.demo.<name>`` and gives it the job."""
        # All children compute with the same number of threads: equal results need equal kernels.
        env = {**os.environ, "OMP_NUM_THREADS": str(self._job.threads)}
        process = subprocess.Popen(
            [*python, "-m", f"kvzc.demo.{name}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=env,
            # Ctrl-C then reaches the parent alone, which ends the children.
            start_new_session=True,
        )
        child = Child(name, process)
        self._children.append(child)
        threading.Thread(target=self._listen, args=(child,), daemon=True).start()
        return child

    def send(self, child: Child, command: str, **fields: Any) -> None:
        """Sends one command. That a child is gone shows when its events are read."""
        assert child.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            child.process.stdin.write(json.dumps({"command": command, **fields}) + "\n")
            child.process.stdin.flush()

    def expect(self, child: Child, event: str) -> dict[str, Any]:
        """Waits for ``event`` from ``child``; the events of all children are seen meanwhile.

        Raises ChildDied or ChildFailed as soon as that happens to any child, and ChildSilent
        when ``child`` says nothing, not even progress, for the job's timeout.
        """
        heard = time.monotonic()
        while True:
            for index, fields in enumerate(child.events):
                if fields["event"] == event:
                    return child.events.pop(index)
            silent_s = time.monotonic() - heard
            if silent_s > self._job.timeout_s:
                raise ChildSilent(
                    f"{child.name} (pid {child.pid}) said nothing for {silent_s:.0f} s; "
                    f"its last word: {child.doing}. --timeout allows more"
                )
            try:
                speaker, said = self._events.get(timeout=0.2)
            except queue.Empty:
                self._progress.note(f"{child.name}: {child.doing}")
                continue
            if speaker is child:
                heard = time.monotonic()
            self._take(speaker, said)

    def dismiss(self, child: Child) -> None:
        """Lets a child whose work is done exit, and waits for it. Raises ChildDied, ChildSilent."""
        child.dismissed = True
        child.doing = "exiting"
        self.send(child, "exit")
        try:
            code = child.process.wait(self._job.timeout_s)
        except subprocess.TimeoutExpired:
            raise ChildSilent(f"{child.name} (pid {child.pid}) did not exit when told to") from None
        if code != 0:
            raise _death(child, code)

    def close(self) -> None:
        """Ends and reaps every child that is still there."""
        for child in self._children:
            child.process.kill()
        for child in self._children:
            child.process.wait()
            with contextlib.suppress(BrokenPipeError):
                assert child.process.stdin is not None
                child.process.stdin.close()

    def _listen(self, child: Child) -> None:
        # A long prompt fills the pipe, and a child that hangs would never empty it: not the main
        # thread's risk. The child says nothing, so nothing else is sent, before it has the job.
        self.send(child, "job", job=self._job.to_json())
        assert child.process.stdout is not None
        with child.process.stdout as lines:
            for line in lines:
                # A child that is killed may leave half a line.
                with contextlib.suppress(json.JSONDecodeError):
                    self._events.put((child, json.loads(line)))
        self._events.put((child, None))

    def _take(self, child: Child, said: dict[str, Any] | None) -> None:
        if said is None:
            child.eof = True
            if not child.dismissed:
                raise self._died(child)
        elif said["event"] == "progress":
            child.doing = said["doing"]
            self._progress.note(f"{child.name}: {child.doing}")
        elif said["event"] == "error":
            raise self._failed(child, said)
        else:
            child.events.append(said)

    def _died(self, child: Child) -> DemoError:
        try:
            return _death(child, child.process.wait(_REAP_TIMEOUT_S))
        except subprocess.TimeoutExpired:
            return ChildDied(f"{child.name} (pid {child.pid}) closed its pipe while {child.doing}")

    def _failed(self, child: Child, said: dict[str, Any]) -> DemoError:
        text = f"{child.name} (pid {child.pid}): {said['name']}: {said['text']}"
        # Often it is the survivor that complains. If another process died, that is the cause.
        deadline = time.monotonic() + _CAUSE_TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0:
            for other in self._children:
                code = other.process.poll()
                if other is not child and not other.dismissed and code is not None and code < 0:
                    return ChildDied(f"{_death(other, code)}; then {text}")
            time.sleep(min(left, 0.02))
        return ChildFailed(text)


def _death(child: Child, code: int) -> ChildDied:
    if code < 0:
        try:
            how = f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            how = f"was killed by signal {-code}"
    else:
        how = f"ended with exit code {code}"
    return ChildDied(f"{child.name} (pid {child.pid}) {how} while {child.doing}")
