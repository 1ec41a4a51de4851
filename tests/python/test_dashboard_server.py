# SPDX-License-Identifier: Apache-2.0
"""The dashboard of a controller, over HTTP, with a real pool: its answers, who gets them, and how
it handles malformed requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import select
import signal
import socket
import stat
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pool_processes import SECONDS_MAX, PoolProcesses, Process, pool_of
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_plain
from shown_pools import FIRST, GROUP, SECOND, busy_status, status
from terminal_program import TerminalProgram

from penstock import __version__
from penstock.errors import PenstockError
from penstock.live import dashboard_server, pool_watch
from penstock.live.dashboard_access import parse_listen_address
from penstock.live.dashboard_server import HEAD_BYTES_MAX, Dashboard
from penstock.live.pool_view import PoolAddress, pool_view
from penstock.live.pool_watch import PoolWatch

pytestmark = pytest.mark.slow

TOKEN = "0123456789abcdef0123456789abcdef"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
GRAFANA = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "penstock.json"


class Site:
    """A dashboard's address, and requests to it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}/"

    def ask(
        self, path: str = "/", method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS_MAX)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def wait_for(self, path: str, is_so: Callable[[Any], bool], **headers: str) -> Any:
        deadline = time.monotonic() + SECONDS_MAX
        while True:
            status, _, content = self.ask(path, **headers)
            fields = json.loads(content)
            if status == 200 and is_so(fields):
                return fields
            assert time.monotonic() < deadline, fields
            time.sleep(0.1)

    def say(self, text: bytes, *, until_end: bool = True) -> bytes:
        """Sends bytes and returns the whole response."""
        with socket.create_connection(("127.0.0.1", self.port), SECONDS_MAX) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(text)
            answer = b""
            with contextlib.suppress(OSError):
                while until_end and (part := connection.recv(65536)):
                    answer += part
            return answer


def port_of(process: Process) -> int:
    line = process.wait_for_lines(lambda line: "the dashboard is at http://" in line)[0]
    match = re.search(r"http://[^/]*:(\d+)/", line)
    assert match is not None
    return int(match[1])


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


@pytest.fixture
def site(pool: PoolProcesses) -> Site:
    """The dashboard of a second controller, which owns the pool from now on. It requires no
    token."""
    return Site(port_of(pool.start_controller("--dashboard", "0", "--dashboard-open")))


@pytest.fixture
def guarded(pool: PoolProcesses, tmp_path: Path) -> Site:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    options = ["--dashboard", "0.0.0.0:0", "--dashboard-token-file", str(token)]
    return Site(port_of(pool.start_controller(*options)))


def test_pool_is_served_as_json_and_a_killed_worker_as_an_event(
    pool: PoolProcesses, site: Site
) -> None:
    worker, _ = pool.start_workers(2)
    pool.start_training()
    fields = site.wait_for(
        "/api/status",
        lambda status: bool(status["trainers"]) and status["trainers"][0]["batches_per_s"],
    )
    assert fields["endpoint"] == pool.endpoint
    assert fields["totals"]["workers_by_state"]["serving"] == 2
    assert {part["name"] for part in fields["step_parts"]} >= {"compute", "dataset", "wire"}
    trainer_id = fields["trainers"][0]["id"]
    assert {len(one["id"]) for one in fields["workers"] + fields["trainers"]} == {8}
    assert fields["trainers"][0]["ledger"]["steps"] > 0
    plan = site.wait_for(f"/api/plan?trainer={trainer_id}", lambda told: told["plan"])["plan"]
    assert {call["where"] for call in plan["calls"]} == {"worker", "trainer"}
    assert any(edge["source"] is None for edge in plan["edges"]) and "calls run" in plan["verdict"]
    # A trainer that had left when the page requested its plan caused an error in the console.
    status, _, content = site.ask("/api/plan?trainer=0123456789abcdef")
    gone = {"trainer": "0123456789abcdef", "plan": None, "has_left": True}
    assert (status, json.loads(content)) == (200, gone)
    status, _, content = site.ask("/api/plan?trainer=0x12")
    assert (
        status == 400
        and "trainer must be an id from /api/status, got '0x12'" in json.loads(content)["error"]
    )
    points = site.wait_for("/api/history", lambda history: len(history["points"]) >= 2)["points"]
    assert points[-1]["workers"] == 2 and points[-1]["at"] > points[0]["at"]
    newer = json.loads(site.ask(f"/api/history?since={points[0]['sequence']}")[2])["points"]
    assert newer[0]["sequence"] == points[0]["sequence"] + 1
    pid = worker.served()[0][2]
    os.kill(pid, signal.SIGKILL)

    def death(events: Any) -> list[Any]:
        return [e for e in events["events"] if e["kind"] == "worker_died" and str(pid) in e["text"]]

    (died,) = death(site.wait_for("/api/events", lambda events: bool(death(events))))
    later = json.loads(site.ask(f"/api/events?since={died['sequence']}")[2])
    assert all(event["sequence"] > died["sequence"] for event in later["events"])


def test_metrics_are_served_in_both_formats(pool: PoolProcesses, site: Site) -> None:
    pool.start_worker()
    pool.start_training()
    site.wait_for("/api/history", lambda history: history["points"][-1]["batches_per_s"] > 0)
    status, headers, plain = site.ask("/metrics")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    names = {sample.name for family in parse_plain(plain.decode()) for sample in family.samples}
    assert {"penstock_workers", "penstock_job_batches_total", "penstock_events_total"} <= names
    assert {"penstock_job_steps_total", "penstock_job_step_seconds_total"} <= names
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    status, headers, text = site.ask("/metrics", Accept=accept)
    assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert {s.name for family in parse_open(text.decode()) for s in family.samples} == names


def test_pages_have_security_headers(site: Site) -> None:
    for path, kind in (("/", "text/html"), ("/index.html", "text/html"), ("/api/events", "json")):
        site.wait_for("/api/status", lambda status: True)
        status, headers, content = site.ask(path, Origin="http://evil.example")
        assert status == 200 and kind in headers["Content-Type"] and content
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert not [name for name in headers if name.lower().startswith("access-control")]
        status, of_head, nothing = site.ask(path, "HEAD")
        assert (status, nothing) == (200, b"") and int(of_head["Content-Length"]) > 0


def test_other_methods_and_unknown_paths_are_rejected(site: Site) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE", "BREW"):
        status, headers, content = site.ask("/", method, b"x" * 1000)
        assert (status, headers["Allow"]) == (405, "GET, HEAD"), method
        assert b"it answers GET and HEAD" in content
    for path in ("/nothing", "/../index.html", "/pages/index.html", "/%2e%2e/x", "//etc/passwd"):
        status, _, content = site.ask(path)
        assert status == 404 and b"the dashboard is at /" in content, path
    status, _, content = site.ask("/api/nothing")
    assert status == 404 and "the dashboard is at /" in json.loads(content)["error"]
    site.wait_for("/api/status", lambda status: True)
    status, _, content = site.ask("/api/events?since=-1")
    assert (
        status == 400
        and "since must be the number of a point or an event, got '-1'"
        in json.loads(content)["error"]
    )


def test_malformed_url_gets_an_explanation(site: Site) -> None:
    """The connection was closed without an answer."""
    answer = site.say(b"GET http://[::1/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"an address must be a path with at most 10 fields, got 'http://[::1/'" in answer
    for path in ("/?", "/api/events?", "/metrics?"):
        status, _, content = site.ask(path + "&".join(f"field{n}=1" for n in range(11)))
        assert status == 400 and b"at most 10 fields" in content


def test_unknown_host_name_is_not_served(site: Site) -> None:
    status, _, content = site.ask("/api/status", Host="evil.example")
    assert status == 421 and b"--dashboard-name" in content
    assert site.say(b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 421")
    assert site.say(b"GET / HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 421")


def test_token_in_the_url_is_exchanged_for_a_cookie(guarded: Site) -> None:
    for path in ("/", "/api/status", "/metrics", "/app.js"):
        status, headers, content = guarded.ask(path)
        assert (status, headers["WWW-Authenticate"]) == (401, 'Bearer realm="penstock"')
        assert b"?token=TOKEN" in content and b"Authorization: Bearer" in content
    status, headers, content = guarded.ask("/?token=wrong-wrong-wrong-wrong")
    assert status == 401 and b"the token in the address is wrong" in content
    assert headers["Set-Cookie"] is None
    status, headers, content = guarded.ask(f"/?token={TOKEN}")
    assert status == 200 and b'http-equiv="refresh"' in content and TOKEN.encode() not in content
    assert "HttpOnly" in headers["Set-Cookie"] and "SameSite=Strict" in headers["Set-Cookie"]
    cookie = headers["Set-Cookie"].partition(";")[0]
    assert guarded.ask("/", Cookie=cookie)[0] == 200
    assert guarded.ask("/?token=x", Cookie=cookie)[0] == 401
    assert guarded.ask("/", Authorization=f"Bearer {TOKEN}")[0] == 200
    assert guarded.ask("/", Authorization=f"Bearer {TOKEN}", Host="evil.example")[0] == 421


@pytest.mark.long
def test_malformed_requests_end_without_affecting_others(site: Site) -> None:
    long = b"x" * (HEAD_BYTES_MAX + 10)
    for text in (
        b"GET /" + long + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + long + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 3000 + b"\r\n",
    ):
        answer = site.say(text)
        assert answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 414")), answer[:100]
        assert b"request rejected" in answer
    for text in (b"\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        assert b" 200 " not in site.say(text)
    site.say(b"GET / HTTP/1.1\r\n", until_end=False)
    assert site.ask("/index.html")[0] == 200


def test_version_is_shown_only_with_the_token(guarded: Site) -> None:
    for path, method in (("/", "GET"), ("/api/status", "GET"), ("/", "POST"), ("/?token=x", "GET")):
        status, headers, content = guarded.ask(path, method)
        assert status in (401, 405)
        assert __version__ not in f"{headers}{content.decode()}"
    fields = guarded.wait_for("/api/status", lambda status: True, **BEARER)
    assert fields["penstock"] == __version__


@contextlib.contextmanager
def slow_strangers(port: int, count: int) -> Iterator[None]:
    """Connections that send a byte now and then, and that reconnect after they were closed."""
    is_over = threading.Event()

    def connected() -> socket.socket:
        return socket.create_connection(("127.0.0.1", port), SECONDS_MAX)

    connections = [connected() for _ in range(count)]

    def press() -> None:
        place = 0
        while not is_over.wait(0.002):
            try:
                connections[place].send(b"G")
            except OSError:
                connections[place].close()
                connections[place] = connected()
            place = (place + 1) % count

    pressing = threading.Thread(target=press)
    pressing.start()
    try:
        yield
    finally:
        is_over.set()
        pressing.join()
        for one in connections:
            one.close()


def test_strangers_cannot_lock_out_token_holders(guarded: Site) -> None:
    """With 40 slow connections open, each of 40 scrapes got status 503."""
    guarded.wait_for("/api/status", lambda status: True, **BEARER)
    with slow_strangers(guarded.port, 40):
        assert [guarded.ask("/metrics", **BEARER)[0] for _ in range(40)] == [200] * 40


class StillWatch(PoolWatch):
    """The dashboard of a made-up pool that does not change, and whose trainers report ``plan``."""

    def __init__(self, *, shows_ids: bool = True, plan: str = "") -> None:
        super().__init__(PoolAddress("tcp://127.0.0.1:1", None, 1.0), shows_ids=shows_ids)
        self.plan = plan
        self.take(pool_view(busy_status(), time.time()))
        self._taken_at = float("inf")  # never too old

    def start(self) -> None:
        """Sends no request."""

    def close(self) -> None:
        """There is no thread."""

    def _ask_plan(self, trainer: str) -> str:
        assert trainer in (FIRST, SECOND)
        return self.plan


@contextlib.contextmanager
def served(watch: PoolWatch, token: str | None = None) -> Iterator[Site]:
    dashboard = Dashboard(parse_listen_address("0"), token)
    dashboard.start(watch)
    try:
        yield Site(int(dashboard.url.split(":")[2].strip("/")))
    finally:
        dashboard.close()


def stranger(site: Site, host: str = "127.0.0.1") -> socket.socket:
    """Sends no bytes. By the next request of the same address the server has accepted it."""
    return socket.create_connection(("127.0.0.1", site.port), SECONDS_MAX, source_address=(host, 0))


def is_open(connection: socket.socket) -> bool:
    return not select.select([connection], [], [], 0)[0]


@pytest.mark.parametrize("token", [None, TOKEN])
def test_oldest_stranger_is_dropped_for_a_new_one(
    monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    monkeypatch.setattr(dashboard_server, "HEAD_S", 1e6)
    monkeypatch.setattr(dashboard_server, "ADDRESS_UNAUTHENTICATED_MAX", 4)
    with served(StillWatch(), token) as site, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(stranger(site)) for _ in range(6)]
        assert [one.recv(1) for one in silent[:2]] == [b"", b""]
        assert all(is_open(one) for one in silent[2:])
        assert site.ask("/", **BEARER)[0] == 200
        assert silent[2].recv(1) == b""
        assert all(is_open(one) for one in silent[3:])


def test_close_waits_for_its_connection_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken, released = threading.Event(), threading.Event()

    def finish_request(*_: Any) -> None:
        taken.set()
        released.wait(SECONDS_MAX)

    monkeypatch.setattr(dashboard_server.BoundedServer, "finish_request", finish_request)
    with contextlib.ExitStack() as stack:
        site = stack.enter_context(served(StillWatch(), None))
        stack.enter_context(stranger(site))
        assert taken.wait(SECONDS_MAX)
        closing = threading.Thread(target=stack.pop_all().close)
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
        released.set()
        closing.join(SECONDS_MAX)
        assert not closing.is_alive()


def test_address_with_the_most_strangers_is_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_server, "HEAD_S", 1e6)
    monkeypatch.setattr(dashboard_server, "UNAUTHENTICATED_MAX", 4)
    with served(StillWatch(), TOKEN) as site, contextlib.ExitStack() as stack:
        other = stack.enter_context(stranger(site, "127.0.0.2"))
        silent = [stack.enter_context(stranger(site)) for _ in range(9)]
        assert [one.recv(1) for one in silent[:6]] == [b""] * 6
        assert is_open(other) and all(is_open(one) for one in silent[6:])


def test_silent_strangers_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_server, "HEAD_S", 0.1)
    with served(StillWatch(), TOKEN) as site, stranger(site) as silent, stranger(site) as slow:
        assert silent.recv(1) == b""
        with contextlib.suppress(OSError):
            slow.sendall(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(OSError):  # unread bytes reset the connection
            assert not slow.recv(1)


def test_token_holder_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_server, "AUTHENTICATED_MAX", 0)
    with served(StillWatch(), TOKEN) as site:
        for path, headers in (("/", BEARER), (f"/?token={TOKEN}", {})):
            status, answered, content = site.ask(path, **headers)
            assert (status, answered["Retry-After"]) == (503, "1")
            assert b"too many connections are open" in content


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2", True),
        ("::1", "127.0.0.1", False),
    ],
)
def test_addresses_of_one_source_are_counted_together(one: str, other: str, is_same: bool) -> None:
    assert (dashboard_server._source(one) == dashboard_server._source(other)) == is_same


@pytest.mark.parametrize("plan", ["[" * 100_000, "nonsense", "{}", "[1]", '{"calls": 3}'])
def test_malformed_plan_gets_an_explanation(plan: str) -> None:
    """The connection was closed without an answer, or the trainer was reported as missing."""
    with served(StillWatch(plan=plan)) as site:
        status, _, content = site.ask(f"/api/plan?trainer={FIRST}")
        assert status == 400
        assert "reported an invalid plan" in json.loads(content)["error"]


def test_open_dashboard_shows_only_id_prefixes() -> None:
    with served(StillWatch(shows_ids=False)) as site:
        status, _, content = site.ask("/api/status")
        assert status == 200
        fields = json.loads(content)
        ids = [one["id"] for one in (*fields["workers"], *fields["trainers"], *fields["jobs"])]
        assert {len(one) for one in ids} == {8} and len(set(ids)) > 4
        assert fields["workers"][0]["works_for"] == fields["trainers"][0]["id"] == FIRST[:8]
        told = content + site.ask("/metrics")[2] + site.ask("/api/history")[2]
        for identity in (FIRST, SECOND, GROUP):
            assert identity.encode() not in told
        plan = json.loads(site.ask(f"/api/plan?trainer={FIRST[:8]}")[2])
        assert plan == {"trainer": FIRST[:8], "plan": None, "has_left": False}


def test_token_is_generated_without_a_token_file(pool: PoolProcesses) -> None:
    """Every user of the machine could read the dashboard."""
    controller = pool.start_controller("--dashboard", "0")
    site = Site(port_of(controller))
    assert site.ask("/api/status")[0] == 401
    (line,) = controller.wait_for_lines(lambda line: "open the dashboard at" in line)
    found = re.search(r"(http://\S+)\?token=\$\(cat (\S+)\)$", line)
    assert found is not None and found[1] == f"http://127.0.0.1:{site.port}/"
    path = Path(found[2])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    token = path.read_text().strip()
    assert len(token) == 32 and token not in controller.output
    assert site.ask("/", Authorization=f"Bearer {token}")[0] == 200
    assert controller.end() == 0
    assert not path.exists()


def test_terminal_shows_the_url_with_the_generated_token(pool: PoolProcesses) -> None:
    command = [sys.executable, "-m", "penstock", "controller", "--bind", "tcp://127.0.0.1:0"]
    shown = re.compile(r"http://127\.0\.0\.1:(\d+)/\?token=([0-9a-f]{32})")
    program = TerminalProgram([*command, "--dashboard", "0"], pool.environment, columns=250)
    try:
        found = shown.search(program.wait(lambda text: shown.search(text) is not None))
        assert found is not None
        assert Site(int(found[1])).ask("/", Authorization=f"Bearer {found[2]}")[0] == 200
    finally:
        program.close()


def test_scrape_ends_when_the_controller_is_killed(pool: PoolProcesses, site: Site) -> None:
    """Each scrape is complete, or fails; none hangs."""
    site.wait_for("/api/status", lambda status: True)
    outcomes: list[str] = []
    is_over = threading.Event()

    def scrape() -> None:
        while not is_over.is_set():
            try:
                status, headers, text = site.ask("/metrics")
            except (OSError, http.client.HTTPException):
                outcomes.append("broken off")
                return
            assert status == 200 and len(text) == int(headers["Content-Length"])
            list(parse_plain(text.decode()))
            outcomes.append("whole")

    scrapers = [threading.Thread(target=scrape) for _ in range(4)]
    for one in scrapers:
        one.start()
    while outcomes.count("whole") < 20:
        time.sleep(0.01)
    pool.processes[-1].process.kill()
    for one in scrapers:
        one.join(SECONDS_MAX)
    is_over.set()
    assert not any(one.is_alive() for one in scrapers)
    assert outcomes.count("broken off") == len(scrapers)


def test_dead_pool_is_reported_with_status_503(
    pool: PoolProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_watch, "STALE_S", 0.5)
    with served(PoolWatch(PoolAddress(pool.endpoint, None, 0.3))) as site:
        site.wait_for("/api/status", lambda status: True)
        pool.processes[0].process.kill()
        deadline = time.monotonic() + SECONDS_MAX
        while site.ask("/metrics")[0] == 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for path in ("/metrics", "/api/status", "/api/history", "/api/events"):
            status, headers, content = site.ask(path)
            assert status == 503 and "pool status unavailable" in content.decode()
            assert ("json" in headers["Content-Type"]) == path.startswith("/api/")
        assert site.ask("/")[0] == 200  # the page, which shows the same


@pytest.mark.parametrize("jump_s", [365 * 86_400, -365 * 86_400])
def test_status_age_is_independent_of_the_wall_clock(
    monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """The status of a dead pool was shown for a year after the clock had been set back by a
    year."""
    watch = PoolWatch(PoolAddress("tcp://127.0.0.1:1", None, 0.3))
    now = time.time()
    watch.take(pool_view(status([], []), now))
    monkeypatch.setattr(time, "time", lambda: now + jump_s)
    assert json.loads(watch.status_json())
    monkeypatch.setattr(pool_watch, "STALE_S", -1.0)
    with pytest.raises(PenstockError, match="the last status is 0 s old"):
        watch.status_json()


def test_taken_port_and_invalid_options_are_reported(
    pool: PoolProcesses, site: Site, tmp_path: Path
) -> None:
    token = tmp_path / "readable"
    token.write_text(TOKEN)
    token.chmod(0o644)
    keys = tmp_path / "keys"
    keys.mkdir()
    for options, code, words in (
        (["--dashboard", str(site.port)], 1, "is taken by another process"),
        (["--dashboard", "0.0.0.0:0", "--dashboard-open"], 1, "so it needs a token: leave"),
        (["--dashboard", "192.0.2.1:0", "--dashboard-token-file", str(token)], 1, "chmod 600"),
        (["--dashboard", "http"], 2, "--dashboard must be PORT or ADDRESS:PORT"),
        (["--dashboard-token-file", str(token)], 2, "require --dashboard PORT"),
        (["--dashboard-open"], 2, "require --dashboard PORT"),
        (
            ["--dashboard", "0", "--dashboard-open", "--dashboard-token-file", str(token)],
            2,
            "--dashboard-open and --dashboard-token-file are mutually exclusive; leave one out",
        ),
        (["--dashboard", "0", "--keys", str(keys)], 1, "has no operator.secret"),
    ):
        process = Process(["controller", "--bind", "tcp://127.0.0.1:0", *options], pool.environment)
        assert process.wait() == code
        assert words in process.output, options
    token.chmod(0o600)
    process = Process(
        ["controller", "--bind", "tcp://127.0.0.1:0", "--dashboard", "192.0.2.1:0"]
        + ["--dashboard-token-file", str(token)],
        pool.environment,
    )
    assert process.wait() == 1
    assert "is not an address of this machine" in process.output


@pytest.mark.long
def test_elastic_pool_exports_every_metric_that_grafana_queries(
    pool: PoolProcesses, tmp_path: Path
) -> None:
    options = ["--engine", "local", "--max", "2", "--price", "1", "--budget", "5"]
    process = Process(
        ["up", *options, "--state", str(tmp_path / "state"), "--dashboard", "0"]
        + ["--dashboard-open"],
        pool.environment,
    )
    pool.processes.append(process)
    site = Site(port_of(process))
    pool.endpoint = process.wait_for_lines(lambda line: "PENSTOCK_POOL=" in line)[0].split("=")[1]
    pool.start_training()
    site.wait_for("/api/history", lambda history: history["points"][-1]["batches_per_s"] > 0)
    families = list(parse_plain(site.ask("/metrics")[2].decode()))
    names = {sample.name for family in families for sample in family.samples}
    fields = json.loads(GRAFANA.read_text())
    queries = [target["expr"] for panel in fields["panels"] for target in panel["targets"]]
    queries += [v["definition"] for v in fields["templating"]["list"] if v["type"] == "query"]
    assert len(queries) > 20
    for query in queries:
        used = set(re.findall(r"\bpenstock_[a-z_]+", query))
        assert used and used <= names, query
    labels = {key for family in families for s in family.samples for key in s.labels}
    for query in queries:
        by = re.findall(r"by \(([^)]*)\)", query)
        assert {name.strip() for one in by for name in one.split(",")} <= labels, query
    kinds = {panel["type"] for panel in fields["panels"]}
    assert kinds == {"stat", "timeseries"} and fields["schemaVersion"] >= 39
    assert len({panel["id"] for panel in fields["panels"]}) == len(fields["panels"])
    scaled = site.wait_for("/api/events", lambda e: any(x["kind"] == "scaled" for x in e["events"]))
    assert any("workers wanted" in event["text"] for event in scaled["events"])


def test_token_is_not_logged(guarded: Site, pool: PoolProcesses) -> None:
    urllib.request.urlopen(f"http://127.0.0.1:{guarded.port}/?token={TOKEN}", timeout=9).read()
    assert TOKEN not in pool.processes[-1].output
