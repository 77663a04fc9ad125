"""A real S3 server in a process of its own, for the tests of object stores."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((LOOPBACK, 0))
        return int(sock.getsockname()[1])


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Yield the address of a server on loopback, which takes any key."""
    port = free_port()
    log = folder / "log"
    with open(log, "w") as file:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", LOOPBACK, "-p", str(port)],
            stdout=file,
            stderr=file,
            env={**os.environ, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"},
        )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection((LOOPBACK, port), timeout=1).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"the S3 server did not start: {log.read_text()}") from None
                time.sleep(0.1)
        yield f"http://{LOOPBACK}:{port}"
    finally:
        server.terminate()
        server.wait()
