"""Runs a command on another host with this process's input and output, as ssh does, for guests
that have none. There: remote.py serve HOST:PORT COMMAND, here: remote.py run HOST:PORT ARGUMENTS.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time


def address(text: str) -> tuple[str, int]:
    host, port = text.rsplit(":", 1)
    return host, int(port)


def serve(where: str, command: list[str]) -> None:
    with socket.create_server(address(where)) as listener:
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb", 0) as lines:
                arguments = json.loads(lines.readline())
                child = subprocess.Popen(
                    [*command, *arguments], stdin=connection, stdout=connection
                )
                child.wait()


def run(where: str, arguments: list[str]) -> None:
    end = time.monotonic() + 120
    while True:
        try:
            connection = socket.create_connection(address(where), timeout=10)
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)
    connection.settimeout(None)
    connection.sendall(json.dumps(arguments).encode() + b"\n")

    def send() -> None:
        while chunk := os.read(0, 1 << 16):
            connection.sendall(chunk)
        connection.shutdown(socket.SHUT_WR)

    threading.Thread(target=send, daemon=True).start()
    while chunk := connection.recv(1 << 16):
        while chunk:
            chunk = chunk[os.write(1, chunk) :]
    os._exit(0)


if __name__ == "__main__":
    what, where, *rest = sys.argv[1:]
    {"serve": serve, "run": run}[what](where, rest)
