"""The parent: starts the processes, passes their words on, compares the answers."""

from __future__ import annotations

import argparse
import importlib.util
import json
import secrets
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from kvzc.demo import report, text
from kvzc.demo.crew import Crew, DemoError, Progress
from kvzc.demo.job import Job, ModelConfig

EXIT_OK, EXIT_WRONG, EXIT_USAGE, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 2, 3, 130

SUMMARY = "split one request over a prefill and a decode process and check the answer"

DESCRIPTION = """\
Runs a small transformer (random weights, made here, nothing is downloaded) as a real
prefill/decode split on this machine. One process computes the prompt and puts the keys and
values of each layer into the paged KV cache of another as soon as they are there, block by
block, while it goes on computing. The other waits for each layer's notify and generates.
A third process then does all the work alone: both answers must be equal, token for token.

With --decode-python the decode process runs on another host, and the bytes go over a network.

With --corrupt one layer is left out on purpose, though its notify is sent. The answers must
then differ, which shows that the comparison would notice a wrong transfer."""

EPILOG = """\
exit codes:
  0    the answers are equal (with --corrupt: they differ, as intended)
  1    they are not
  2    the command line is wrong, or PyTorch is missing
  3    the run did not get to its end: a process died, failed or was silent for too long
  130  interrupted"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's options to ``parser``."""
    add = parser.add_argument
    add(
        "--tokens",
        type=_at_least(2),
        default=4096,
        metavar="N",
        help="length of the prompt in tokens, one a byte (default: %(default)s)",
    )
    add(
        "--generate",
        type=_at_least(2),
        default=32,
        metavar="N",
        help="tokens to generate, greedily (default: %(default)s)",
    )
    add(
        "--layers",
        type=_at_least(1),
        default=8,
        metavar="N",
        help="layers of the model (default: %(default)s)",
    )
    add(
        "--block-tokens",
        type=_at_least(1),
        default=16,
        metavar="N",
        help="tokens in one block of the KV cache (default: %(default)s)",
    )
    add(
        "--text",
        metavar="FILE",
        help="take the prompt from FILE (default: a text that comes with kvzc)",
    )
    add(
        "--seed",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="seed of weights and block tables (default: %(default)s)",
    )
    add(
        "--threads",
        type=_at_least(1),
        default=1,
        metavar="N",
        help="torch threads in each process (default: %(default)s)",
    )
    add(
        "--transport",
        metavar="NAME",
        help="use this transport only, for example rdma (default: the best that both can)",
    )
    add(
        "--decode-python",
        type=_words,
        metavar="COMMAND",
        help="the Python that runs the decode process, on another host for example: "
        "'ssh host-b /opt/kvzc/bin/python'. Its input and output must get there and back",
    )
    add(
        "--listen",
        metavar="HOST:PORT",
        help="where decode listens for prefill, on the other host (default with "
        "--decode-python: 0.0.0.0:0, any free port on all its networks)",
    )
    add("--corrupt", action="store_true", help="leave one layer out and expect different answers")
    add("--json", action="store_true", help="print the result as one JSON object")
    add(
        "--timeout",
        type=_positive,
        default=120.0,
        metavar="S",
        help="seconds without a word from a process until it counts as stuck "
        "(default: %(default)g)",
    )
    add(
        "--progress",
        type=_seconds,
        default=2.0,
        metavar="S",
        help="print a progress line on stderr every S seconds, 0 for every step "
        "(default: %(default)g)",
    )


def main(options: argparse.Namespace) -> int:
    """Runs the demo with parsed options and returns the exit code."""
    if importlib.util.find_spec("torch") is None:
        return _fail(options, EXIT_USAGE, "kvzc demo needs PyTorch: pip install 'kvzc[torch]'")
    try:
        job = _job(options)
    except (OSError, text.TextTooShort) as error:
        return _fail(options, EXIT_USAGE, f"kvzc demo: {error}")
    try:
        result = run(job, Progress(options.progress), options.decode_python)
    except DemoError as error:
        return _fail(options, EXIT_FAILED, f"kvzc demo: {type(error).__name__}: {error}")
    except KeyboardInterrupt:
        return _fail(options, EXIT_INTERRUPTED, "kvzc demo: interrupted; its processes are gone")
    print(json.dumps(result, indent=2) if options.json else report.table(result))
    return EXIT_OK if result["ok"] else EXIT_WRONG


def run(
    job: Job, progress: Progress, decode_python: Sequence[str] = (sys.executable,)
) -> dict[str, Any]:
    """Runs the split and then the reference; returns the result of ``report.result``.

    ``decode_python`` begins the command of the decode process. Raises a DemoError that names the
    process at fault. No child is left in any case.
    """
    with Crew(job, progress) as crew:
        split = _run_split(crew, decode_python)
        # Only now, so that nothing else disturbs the times of the split.
        child = crew.start("reference")
        alone = crew.expect(child, "generated")
        copies = crew.expect(child, "copied")
        crew.dismiss(child)
    return report.result(job, report.Words(**split, alone=alone, copies=copies))


def _run_split(crew: Crew, decode_python: Sequence[str]) -> dict[str, Any]:
    decode, prefill = crew.start("decode", decode_python), crew.start("prefill")
    target = crew.expect(decode, "ready")
    ready = crew.expect(prefill, "ready")
    crew.send(prefill, "target", handle=target["handle"], blocks=target["blocks"])
    prefilled = crew.expect(prefill, "prefilled")
    crew.send(decode, "generate", first_token=prefilled["first_token"])
    sent = crew.expect(prefill, "sent")
    arrived = crew.expect(decode, "arrived")
    generated = crew.expect(decode, "generated")
    for child in (prefill, decode):
        crew.dismiss(child)
    return {
        "pids": {"prefill": prefill.pid, "decode": decode.pid},
        "blocks": {"prefill": ready["blocks"], "decode": target["blocks"]},
        "parameters": ready["parameters"],
        "prefilled": prefilled,
        "sent": sent,
        "arrived": arrived,
        "generated": generated,
    }


def _job(options: argparse.Namespace) -> Job:
    listen = options.listen or ("0.0.0.0:0" if options.decode_python else None)
    options.decode_python = options.decode_python or [sys.executable]
    return Job(
        model=ModelConfig(layers=options.layers),
        tokens=text.encode(text.read_text(options.text), options.tokens),
        generate=options.generate,
        block_tokens=options.block_tokens,
        seed=options.seed,
        threads=options.threads,
        timeout_s=options.timeout,
        omitted_layer=options.layers // 2 if options.corrupt else None,
        transport=options.transport,
        listen=listen,
        secret=None if listen is None else secrets.token_hex(16),
    )


def _fail(options: argparse.Namespace, code: int, message: str) -> int:
    if options.json:
        print(json.dumps({"ok": False, "error": message}))
    print(message, file=sys.stderr)
    return code


def _at_least(least: int) -> Any:
    def number(word: str) -> int:
        value = int(word)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number


def _words(command: str) -> list[str]:
    words = shlex.split(command)
    if not words:
        raise argparse.ArgumentTypeError("is empty")
    return words


def _seconds(word: str) -> float:
    value = float(word)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{word} is not a number of seconds")
    return value


def _positive(word: str) -> float:
    value = _seconds(word)
    if value == 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return value
