# SPDX-License-Identifier: Apache-2.0
"""An HTTP server of the standard library with bounds on the number of connections, and on the time
that each may take in all.

A connection has one request, and a thread that serves it. A thread whose request comes to no end is
ended by its socket.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any

from penstock.errors import PenstockError
from penstock.live.dashboard_access import ListenAddress

CONNECTIONS_MAX = 32
CONNECTION_S = 10.0  # from its beginning to its end
_TURN_S = 0.25
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Connection: close\r\nRetry-After: 1\r\nContent-Length: 54\r\n\r\n"
    b"too many connections are open; try again in a second.\n"
)


class BoundedServer(ThreadingMixIn, HTTPServer):
    """Listens from the beginning; serves between start() and close()."""

    daemon_threads = True
    block_on_close = False  # a thread ends with its socket, at the latest after CONNECTION_S
    allow_reuse_port = False
    request_queue_size = CONNECTIONS_MAX

    def __init__(self, address: ListenAddress, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = address.family
        self._lock = threading.Lock()
        self._deadlines: dict[socket.socket, float] = {}
        self._thread: threading.Thread | None = None
        try:
            super().__init__((address.address, address.port), handler)
        except OSError as error:
            raise _listening_trouble(address, error) from None

    def server_bind(self) -> None:
        """Without looking up the machine's name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        name = self.socket.getsockname()
        self.server_address = name
        self.server_name, self.server_port = str(name[0]), int(name[1])

    def start(self) -> None:
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_TURN_S,), name="penstock-dashboard", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the connections that are open, too."""
        if self._thread is not None:
            self.shutdown()
            self._thread.join()
        self.server_close()
        self._end_connections(before=float("inf"))

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            is_full = len(self._deadlines) >= CONNECTIONS_MAX
            if not is_full:
                self._deadlines[request] = time.monotonic() + CONNECTION_S
        if not is_full:
            return super().process_request(request, client_address)
        request.setblocking(False)
        with contextlib.suppress(OSError):
            request.send(_BUSY)
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        self._end_connections(before=time.monotonic())

    def _end_connections(self, before: float) -> None:
        with self._lock:
            for connection, deadline in self._deadlines.items():
                if deadline <= before:
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or was shown the door, is no news."""


def _listening_trouble(address: ListenAddress, error: OSError) -> PenstockError:
    where = f"port {address.port} of {address.host}"
    if error.errno == errno.EADDRINUSE:
        return PenstockError(
            f"the dashboard's {where} is taken by another process; name another one with "
            f"--dashboard, or 0 for a free one, which is printed"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return PenstockError(
            f"the dashboard cannot listen at {address.host}, which is no address of this machine; "
            f"name one that is, or 0.0.0.0 for all"
        )
    if error.errno == errno.EACCES:
        return PenstockError(
            f"the dashboard may not listen at {where}; ports below 1024 are root's, so name a "
            f"higher one"
        )
    return PenstockError(f"the dashboard cannot listen at {where}: {os.strerror(error.errno or 0)}")
