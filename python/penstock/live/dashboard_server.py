# SPDX-License-Identifier: Apache-2.0
"""The dashboard of a pool: pages for browsers, JSON for programs, metrics for Prometheus.

It answers only GET and HEAD, and changes no state.

The server builds on the standard library's, with limits on the number of connections, on the time
of each connection, and on the bytes of a request's head. A connection carries one request and has a
thread, which serves the request and ends with the socket. Since any client may connect, a
connection counts as a stranger until its request has shown the token. Strangers have separate
places: when these are taken, a new connection replaces the oldest one from the address with the
most connections. So strangers can neither use up the places of token holders, nor prevent a request
with the token from being read.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.resources import files
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import parse_qs, urlsplit

from penstock.errors import PenstockError
from penstock.live.dashboard_access import DashboardAccess, ListenAddress
from penstock.live.pool_metrics import OPEN_TYPE, PLAIN_TYPE, wants_open_metrics
from penstock.live.pool_watch import PoolWatch

QUERY_FIELDS_MAX = 10
_READ_S = 5.0  # how long a client may stop reading an answer
_LINGER_S, _LINGER_BYTES_MAX = 1.0, 1 << 20  # limits for discarding an unread request
_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
_HTML = "text/html; charset=utf-8"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
    "Connection": "close",
}
# A page instead of a redirect: after a link on another site, a browser withholds a strict cookie
# until a page of this site leads on.
_FORWARDING_PAGE = (
    b'<!doctype html><html lang="en"><meta charset="utf-8"><title>penstock</title>'
    b'<meta http-equiv="refresh" content="0;url=/"><p><a href="/">Open the dashboard</a></p>'
)
AUTHENTICATED_MAX = 32  # connections that have shown the token
UNAUTHENTICATED_MAX = 64  # connections that have not shown the token
ADDRESS_UNAUTHENTICATED_MAX = 32  # strangers from one address
HEAD_S = 2.0  # from the start of a connection until its request is read
CONNECTION_S = 10.0  # from the start of a connection until its end
_BACKLOG = 128
_POLL_S = 0.25
_CLOSE_S = 5.0  # for the threads of connections that close() ends
_IPV6_SITE_BITS = 64  # the prefix length of a site; its owner has all addresses with that prefix
HEAD_BYTES_MAX = 16 << 10
_FILE_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class Dashboard:
    """A pool's dashboard. It listens from construction on, and serves from start() on."""

    def __init__(
        self, address: ListenAddress, token: str | None, names: Sequence[str] = ()
    ) -> None:
        """Start to listen. Raises PenstockError if this is not possible."""
        access = DashboardAccess(address, token, names)
        self._files = page_files()
        self._watch: PoolWatch | None = None
        dashboard = self

        class Handler(_Handler):
            def setup(self) -> None:
                self.access, self.dashboard = access, dashboard
                super().setup()

        self._server = BoundedServer(address, Handler)
        host = f"[{address.host}]" if ":" in address.host else address.host
        self.url = f"http://{host}:{self._server.server_port}/"

    def start(self, watch: PoolWatch) -> None:
        """Start to serve, and start the watch, too."""
        self._watch = watch
        watch.start()
        self._server.start()

    def close(self) -> None:
        self._server.close()
        if self._watch is not None:
            self._watch.close()

    def answer(self, path: str, query: dict[str, list[str]], accept: str) -> tuple[bytes, str]:
        """Return the content and its media type. Raises NoPageError for an unknown path, ValueError
        for an invalid query, and PenstockError while the pool's status is unavailable."""
        if path in self._files:
            file = self._files[path]
            return file.content, file.content_type
        assert self._watch is not None
        if path == "/metrics":
            is_open = wants_open_metrics(accept)
            content = self._watch.metrics_text(is_open=is_open)
            return content, OPEN_TYPE if is_open else PLAIN_TYPE
        if path == "/api/status":
            return self._watch.status_json(), _JSON
        if path == "/api/plan":
            return self._watch.plan_json(query.get("trainer", [""])[-1]), _JSON
        read: dict[str, Callable[[int], bytes]] = {
            "/api/history": self._watch.history_json,
            "/api/events": self._watch.events_json,
        }
        if path not in read:
            raise NoPageError(path)
        return read[path](_since(query)), _JSON


class NoPageError(Exception):
    """An address without a page."""


def _since(query: dict[str, list[str]]) -> int:
    given = query.get("since", ["0"])[-1]
    if not re.fullmatch(r"[0-9]{1,15}", given):
        raise ValueError(f"since must be the number of a point or an event, got {given[:40]!r}")
    return int(given)


class _Handler(BaseHTTPRequestHandler):
    """Handles the single request of a connection."""

    protocol_version = "HTTP/1.1"
    timeout = _READ_S
    server: BoundedServer
    access: DashboardAccess
    dashboard: Dashboard

    def setup(self) -> None:
        super().setup()
        self._head = RequestHead(self.rfile)
        self.rfile = self._head  # type: ignore[assignment]

    def version_string(self) -> str:
        return "penstock"  # without the version, as any client can read it

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log no requests, as an address may contain a token."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that the standard library rejects."""
        self.close_connection = True
        phrase = message or HTTPStatus(code).phrase
        self._send(code, f"request rejected: {phrase}\n".encode(), _TEXT)

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        self.close_connection = True
        if self._head.is_too_long:
            self.request_version = self.protocol_version  # may still be unset
            sentence = f"request rejected: its head must have at most {HEAD_BYTES_MAX} bytes"
            self._refuse(431, sentence)
            return False
        if self.command not in ("GET", "HEAD"):
            command = self.command[:20]
            self._refuse(
                405,
                f"this dashboard is read-only: it answers GET and HEAD, not {command}",
                Allow="GET, HEAD",
            )
            return False
        return True

    def _refuse(self, status: int, sentence: str, **more: str) -> None:
        """Answer before the request is read, and discard the rest of it: closing a socket with
        unread bytes would retract the answer."""
        self._send(status, f"{sentence}\n".encode(), _TEXT, **more)
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(_LINGER_S)
        left = _LINGER_BYTES_MAX
        while left > 0 and (part := self.connection.recv(65536)):
            left -= len(part)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        try:
            target = urlsplit(self.path)
            query = parse_qs(target.query, max_num_fields=QUERY_FIELDS_MAX)
        except ValueError as error:
            sentence = (
                f"an address must be a path with at most {QUERY_FIELDS_MAX} fields, "
                f"got {self.path[:100]!r}: {error}"
            )
            self._send(400, f"{sentence}\n".encode(), _TEXT)
            return
        headers = self.headers
        refusal = self.access.refusal_of_host(headers.get_all("Host", []))
        is_entering = refusal is None and "token" in query and self.access.has_token
        if is_entering:
            refusal = self.access.refusal_of_token(query["token"][-1])
        elif refusal is None:
            refusal = self.access.refusal_of_credentials(
                headers.get("Authorization"), headers.get("Cookie")
            )
        if refusal is not None:
            more = {"WWW-Authenticate": 'Bearer realm="penstock"'} if refusal.status == 401 else {}
            self._send(refusal.status, f"{refusal.sentence}\n".encode(), _TEXT, **more)
        elif not self.server.admit(self.connection, is_authenticated=self.access.has_token):
            sentence = "too many connections are open; try again in a second"
            self._send(503, f"{sentence}\n".encode(), _TEXT, **{"Retry-After": "1"})
        elif is_entering:
            self._send(200, _FORWARDING_PAGE, _HTML, **{"Set-Cookie": self.access.set_cookie()})
        else:
            self._answer(target.path, query)

    def _answer(self, path: str, query: dict[str, list[str]]) -> None:
        is_api = path.startswith("/api/")
        try:
            content, content_type = self.dashboard.answer(
                path, query, self.headers.get("Accept", "")
            )
        except PenstockError as error:
            self._send_failure(503, f"pool status unavailable: {error}", is_api)
        except NoPageError:
            self._send_failure(
                404, f"there is no page {path[:100]!r}; the dashboard is at /", is_api
            )
        except ValueError as error:
            self._send_failure(400, str(error), is_api)
        except Exception as error:  # otherwise the connection would be closed without an answer
            sentence = f"the dashboard failed at this address: {type(error).__name__}: {error}"
            self._send_failure(500, sentence, is_api)
        else:
            self._send(200, content, content_type)

    def _send_failure(self, status: int, sentence: str, is_api: bool) -> None:
        if is_api:
            self._send(status, json_error(sentence), _JSON)
        else:
            self._send(status, f"{sentence}\n".encode(), _TEXT)

    def _send(self, status: int, content: bytes, content_type: str, **more: str) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **more}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if getattr(self, "command", None) != "HEAD":
            self.wfile.write(content)


def json_error(sentence: str) -> bytes:
    """Return the JSON that programs receive instead of the pool's JSON."""
    return json.dumps({"error": sentence}).encode()


@dataclass(slots=True)
class _Connection:
    source: str
    deadline: float
    is_authenticated: bool = False


class BoundedServer(ThreadingMixIn, HTTPServer):
    """Listens from construction on; serves between start() and close()."""

    daemon_threads = True
    block_on_close = False  # a thread ends with its socket, after CONNECTION_S at the latest
    allow_reuse_port = False
    request_queue_size = _BACKLOG

    def __init__(self, address: ListenAddress, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = address.family
        self._lock = threading.Condition()
        self._open_count = 0  # sockets that their threads have not closed yet
        self._connections: dict[socket.socket, _Connection] = {}  # oldest first
        self._thread: threading.Thread | None = None
        try:
            super().__init__((address.address, address.port), handler)
        except OSError as error:
            raise _listen_error(address, error) from None

    def server_bind(self) -> None:
        """Bind without looking up the machine's name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        name = self.socket.getsockname()
        self.server_address = name
        self.server_name, self.server_port = str(name[0]), int(name[1])

    def start(self) -> None:
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_POLL_S,), name="penstock-dashboard", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the open connections, too, and wait until their threads have closed them."""
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
        """Close a stranger's connection if there are too many. Requires the lock. One is enough, as
        this is called for each new connection."""
        strangers = Counter(
            one.source for one in self._connections.values() if not one.is_authenticated
        )
        source, count = strangers.most_common(1)[0]
        if count <= ADDRESS_UNAUTHENTICATED_MAX and strangers.total() <= UNAUTHENTICATED_MAX:
            return
        oldest = next(
            connection
            for connection, one in self._connections.items()
            if one.source == source and not one.is_authenticated
        )
        del self._connections[oldest]
        _end(oldest)

    def admit(self, request: socket.socket, *, is_authenticated: bool) -> bool:
        """Extend the deadline of a connection whose request was read, and move it to a holder's
        place if it has shown the token. Returns False if no place is free."""
        with self._lock:
            connection = self._connections.get(request)
            holder_count = sum(one.is_authenticated for one in self._connections.values())
            if connection is None or (is_authenticated and holder_count >= AUTHENTICATED_MAX):
                return False
            connection.deadline += CONNECTION_S - HEAD_S
            connection.is_authenticated = is_authenticated
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
        """Ignore errors of clients that have left or been disconnected."""


def _end(connection: socket.socket) -> None:
    """Shut the connection down; its thread then sees it closed."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _source(host: str) -> str:
    """Return the client's address: its network for IPv6."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), _IPV6_SITE_BITS), strict=False))


def _listen_error(address: ListenAddress, error: OSError) -> PenstockError:
    where = f"port {address.port} of {address.host}"
    if error.errno == errno.EADDRINUSE:
        return PenstockError(
            f"the dashboard's {where} is taken by another process; choose another port with "
            "--dashboard, or 0 for a free one, which is printed"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return PenstockError(
            f"the dashboard cannot listen at {address.host}, which is not an address of this "
            "machine; name one that is, or 0.0.0.0 for all"
        )
    if error.errno == errno.EACCES:
        return PenstockError(
            f"no permission for the dashboard to listen at {where}; ports below 1024 are reserved "
            "for root, so choose a higher one"
        )
    return PenstockError(f"the dashboard cannot listen at {where}: {os.strerror(error.errno or 0)}")


class RequestHead:
    """Replaces a connection's stream when the standard library reads lines. If these exceed
    HEAD_BYTES_MAX in all, it ends the head and sets ``is_too_long``."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._left = HEAD_BYTES_MAX
        self.is_too_long = False

    def readline(self, limit: int = -1) -> bytes:
        if self.is_too_long:
            return b"\r\n"
        line: bytes = self._stream.readline(self._left if limit < 0 else min(limit, self._left))
        self._left -= len(line)
        self.is_too_long = self._left == 0 and not line.endswith(b"\n")
        return line

    def close(self) -> None:
        self._stream.close()

    @property
    def closed(self) -> bool:
        closed: bool = self._stream.closed
        return closed


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    content_type: str


def page_files() -> dict[str, PageFile]:
    """Return the pages by path. No other file can be requested."""
    found = {}
    for file in files("penstock").joinpath("pages").iterdir():
        kind = file.name.rpartition(".")[2]
        if kind in _FILE_TYPES:
            found[f"/{file.name}"] = PageFile(file.read_bytes(), _FILE_TYPES[kind])
    found["/"] = found["/index.html"]
    return found
