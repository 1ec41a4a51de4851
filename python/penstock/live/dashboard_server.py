# SPDX-License-Identifier: Apache-2.0
"""The dashboard of a pool: pages for browsers, JSON for programs, metrics for Prometheus.

It answers GET and HEAD alone, and changes nothing.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from penstock.errors import PenstockError
from penstock.live.bounded_server import BoundedServer
from penstock.live.dashboard_access import DashboardAccess, ListenAddress
from penstock.live.dashboard_files import page_files
from penstock.live.exposition import OPEN_TYPE, PLAIN_TYPE, wants_open_metrics
from penstock.live.pool_watch import PoolWatch
from penstock.live.request_head import HEAD_BYTES_MAX, RequestHead

QUERY_FIELDS_MAX = 10
_READ_S = 5.0  # for which a client may read nothing of an answer
_LINGER_S, _LINGER_BYTES_MAX = 1.0, 1 << 20  # of a request that nobody reads
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
# A page and no redirect: after a link on another site, a browser holds a strict cookie back until a
# page of this site leads on.
_ENTRANCE = (
    b'<!doctype html><html lang="en"><meta charset="utf-8"><title>penstock</title>'
    b'<meta http-equiv="refresh" content="0;url=/"><p><a href="/">Go on to the dashboard</a></p>'
)


class Dashboard:
    """A pool's dashboard. It listens as soon as it is made, and serves from start() on."""

    def __init__(
        self, address: ListenAddress, token: str | None, names: Sequence[str] = ()
    ) -> None:
        """Raises PenstockError where it cannot listen."""
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
        """Starts the watch, too."""
        self._watch = watch
        watch.start()
        self._server.start()

    def close(self) -> None:
        self._server.close()
        if self._watch is not None:
            self._watch.close()

    def answer(self, path: str, query: dict[str, list[str]], accept: str) -> tuple[bytes, str]:
        """Content and its type. Raises NoPageError for what there is not, ValueError for a query
        that is wrong, and PenstockError while nothing is known of the pool."""
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
    """There is nothing at an address."""


def _since(query: dict[str, list[str]]) -> int:
    given = query.get("since", ["0"])[-1]
    if not re.fullmatch(r"[0-9]{1,15}", given):
        raise ValueError(f"since is {given[:40]!r}; the number of a point or an event is expected")
    return int(given)


class _Handler(BaseHTTPRequestHandler):
    """One request of one connection."""

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
        return "penstock"  # no version: everybody is told

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: a token may stand in an address."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library finds wrong with a request."""
        self.close_connection = True
        phrase = message or HTTPStatus(code).phrase
        self._send(code, f"the request is refused: {phrase}\n".encode(), _TEXT)

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        self.close_connection = True
        if self._head.is_too_long:
            self.request_version = self.protocol_version  # of which nothing may have been read
            sentence = f"the request is refused: its head has over {HEAD_BYTES_MAX} bytes"
            self._refuse(431, sentence)
            return False
        if self.command not in ("GET", "HEAD"):
            command = self.command[:20]
            self._refuse(
                405,
                f"this dashboard shows and changes nothing: it answers GET and HEAD, not {command}",
                Allow="GET, HEAD",
            )
            return False
        return True

    def _refuse(self, status: int, sentence: str, **more: str) -> None:
        """Before the request is read: the rest of it is thrown away. A socket that is closed with
        unread bytes takes the answer back."""
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
            refusal = self.access.refusal_of_stranger(
                headers.get("Authorization"), headers.get("Cookie")
            )
        if refusal is not None:
            more = {"WWW-Authenticate": 'Bearer realm="penstock"'} if refusal.status == 401 else {}
            self._send(refusal.status, f"{refusal.sentence}\n".encode(), _TEXT, **more)
        elif not self.server.admit(self.connection, is_holder=self.access.has_token):
            sentence = "too many connections are open; try again in a second"
            self._send(503, f"{sentence}\n".encode(), _TEXT, **{"Retry-After": "1"})
        elif is_entering:
            self._send(200, _ENTRANCE, _HTML, **{"Set-Cookie": self.access.set_cookie()})
        else:
            self._answer(target.path, query)

    def _answer(self, path: str, query: dict[str, list[str]]) -> None:
        is_api = path.startswith("/api/")
        try:
            content, content_type = self.dashboard.answer(
                path, query, self.headers.get("Accept", "")
            )
        except PenstockError as error:
            self._send_trouble(503, f"nothing is known of the pool now: {error}", is_api)
        except NoPageError:
            self._send_trouble(
                404, f"there is no {path[:100]!r} here; the dashboard is at /", is_api
            )
        except ValueError as error:
            self._send_trouble(400, str(error), is_api)
        except Exception as error:  # else the connection would be closed without an answer
            sentence = f"the dashboard failed at this address: {type(error).__name__}: {error}"
            self._send_trouble(500, sentence, is_api)
        else:
            self._send(200, content, content_type)

    def _send_trouble(self, status: int, sentence: str, is_api: bool) -> None:
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
    """What programs get instead of JSON of the pool."""
    return json.dumps({"error": sentence}).encode()
