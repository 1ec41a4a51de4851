# SPDX-License-Identifier: Apache-2.0
"""A stranger at the ports of a pool, for bench/strangers.py: connects, has no key, and sends
little. In a separate file, which imports no torch, so that it starts fast.
"""

from __future__ import annotations

import argparse
import json
import resource
import select
import signal
import socket
import sys
import time
from collections import deque

# The first bytes of a peer that speaks ZMTP 3.0 and wants CURVE; its next step would be HELLO.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
INPUT_EVENTS = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR


class Stranger:
    """Connections to ports of this machine, in place of the closed ones."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._is_idle = args.kind != "half_open"
        self._opening = {"idle": b"", "first_byte": GREETING[:1], "half_open": GREETING}[args.kind]
        self._poll = select.epoll()
        self._open: dict[int, socket.socket] = {}
        self._due: deque[float] = deque()  # when the next ones are made
        self._connect_count = self._closed_count = 0

    def run(self) -> dict[str, float]:
        """Until SIGTERM."""
        is_over = False

        def end(*_: object) -> None:
            nonlocal is_over
            is_over = True

        signal.signal(signal.SIGTERM, end)
        print("begins", flush=True)
        begin = time.monotonic()
        if self._is_idle:
            # Not all at the same moment, or the listening queues are measured.
            self._due.extend(
                begin + self._args.renew_s * index / self._args.connections
                for index in range(self._args.connections)
            )
        else:
            self._due.append(begin)
        while not is_over:
            now = time.monotonic()
            while self._due and self._due[0] <= now and not is_over:
                due = self._due.popleft()
                self._connect()
                if not self._is_idle:
                    self._due.append(due + 1 / self._args.handshakes)
            wait_s = max(0.0, self._due[0] - time.monotonic()) if self._due else 0.05
            for fd, event in self._poll.poll(min(wait_s, 0.05)):
                if self._serve(fd, event) and self._is_idle:
                    self._due.append(time.monotonic() + self._args.renew_s)
        seconds = time.monotonic() - begin
        return {
            "connects_per_s": self._connect_count / seconds,
            "closed_per_s": self._closed_count / seconds,
            "open": len(self._open),
        }

    def _connect(self) -> None:
        port = self._args.ports[self._connect_count % len(self._args.ports)]
        self._connect_count += 1
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        connection.connect_ex(("127.0.0.1", port))
        self._open[connection.fileno()] = connection
        says = select.EPOLLOUT if self._opening else 0
        self._poll.register(connection.fileno(), INPUT_EVENTS | says)

    def _serve(self, fd: int, event: int) -> bool:
        """Returns whether the connection has ended."""
        connection = self._open[fd]
        try:
            if event & select.EPOLLOUT and not event & (select.EPOLLHUP | select.EPOLLERR):
                connection.send(self._opening)
                self._poll.modify(fd, INPUT_EVENTS)
            if not event & INPUT_EVENTS or connection.recv(4096):
                return False
        except BlockingIOError:
            return False
        except OSError:
            pass
        del self._open[fd]
        connection.close()  # which takes it out of the poll
        self._closed_count += 1
        return True


def raise_limit() -> None:
    """On open files, to the system's maximum."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("kind", choices=("idle", "first_byte", "half_open"))
    add("--ports", type=int, nargs="+", required=True)
    add("--connections", type=int, required=True, help="connections that an idle stranger keeps")
    add(
        "--renew-s",
        type=float,
        required=True,
        help="seconds before a closed connection is reopened",
    )
    add(
        "--handshakes",
        type=float,
        required=True,
        help="handshakes per second of a half-open stranger",
    )
    args = parser.parse_args()
    raise_limit()
    print(json.dumps(Stranger(args).run()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
