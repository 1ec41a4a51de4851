# SPDX-License-Identifier: Apache-2.0
"""An HTTP server of the standard library with bounds on the number of connections, and on the time
that each may take.

A connection has one request, and a thread that serves it. A thread whose request comes to no end is
ended by its socket. Everybody may connect, so a connection is a stranger's until its request has
shown the token. Strangers have places of their own: the oldest connection of the address that has
the most makes room for a new one. So they can neither take the places of those who have the token,
nor keep a request with the token from being read.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any

from penstock.errors import PenstockError
from penstock.live.dashboard_access import ListenAddress

HOLDERS_MAX = 32  # connections that have shown the token
STRANGERS_MAX = 64  # and that have not
ADDRESS_STRANGERS_MAX = 32  # of these, from one address
HEAD_S = 2.0  # from the beginning of a connection until its request is read
CONNECTION_S = 10.0  # until its end
_BACKLOG = 128
_TURN_S = 0.25
_CLOSE_S = 5.0  # for the threads of connections that close() ends
_IPV6_SITE_BITS = 64  # of an address; who has one has all others that begin so


@dataclass(slots=True)
class _Connection:
    source: str
    deadline: float
    is_holder: bool = False


class BoundedServer(ThreadingMixIn, HTTPServer):
    """Listens from the beginning; serves between start() and close()."""

    daemon_threads = True
    block_on_close = False  # a thread ends with its socket, at the latest after CONNECTION_S
    allow_reuse_port = False
    request_queue_size = _BACKLOG

    def __init__(self, address: ListenAddress, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = address.family
        self._lock = threading.Condition()
        self._open_count = 0  # sockets that a thread has not closed yet
        self._connections: dict[socket.socket, _Connection] = {}  # oldest first
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
        """End the connections that are open, too, and wait until their threads have closed them."""
        if self._thread is not None:
            self.shutdown()
            self._thread.join()
        self.server_close()
        self._end_connections(before=float("inf"))
        with self._lock:
            self._lock.wait_for(lambda: self._open_count == 0, _CLOSE_S)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            deadline = time.monotonic() + HEAD_S
            self._connections[request] = _Connection(_source(client_address[0]), deadline)
            self._open_count += 1
            self._make_room()
        super().process_request(request, client_address)

    def _make_room(self) -> None:
        """Under the lock, and for one connection, since it is called for each."""
        strangers = Counter(one.source for one in self._connections.values() if not one.is_holder)
        source, count = strangers.most_common(1)[0]
        if count <= ADDRESS_STRANGERS_MAX and strangers.total() <= STRANGERS_MAX:
            return
        oldest = next(
            connection
            for connection, one in self._connections.items()
            if one.source == source and not one.is_holder
        )
        del self._connections[oldest]
        _end(oldest)

    def admit(self, request: socket.socket, *, is_holder: bool) -> bool:
        """Gives a connection whose request was read the time for an answer, and one that has shown
        the token a place of its own. False where there is none."""
        with self._lock:
            connection = self._connections.get(request)
            holder_count = sum(one.is_holder for one in self._connections.values())
            if connection is None or (is_holder and holder_count >= HOLDERS_MAX):
                return False
            connection.deadline += CONNECTION_S - HEAD_S
            connection.is_holder = is_holder
            return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)
        with self._lock:
            self._open_count -= 1
            self._lock.notify_all()

    def service_actions(self) -> None:
        self._end_connections(before=time.monotonic())

    def _end_connections(self, before: float) -> None:
        with self._lock:
            for connection, one in self._connections.items():
                if one.deadline <= before:
                    _end(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or was shown the door, is no news."""


def _end(connection: socket.socket) -> None:
    """Its thread finds it closed."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _source(host: str) -> str:
    """Whose a connection is, as far as its address tells."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), _IPV6_SITE_BITS), strict=False))


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
