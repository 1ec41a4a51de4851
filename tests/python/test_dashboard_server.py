# SPDX-License-Identifier: Apache-2.0
"""The dashboard of a controller, over HTTP, beside a real pool: what it answers, to whom, and what
it does with requests that are none."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
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
from shown_pools import status

from penstock.errors import PenstockError
from penstock.live import bounded_server, pool_watch
from penstock.live.dashboard_access import parse_listen_address
from penstock.live.dashboard_server import Dashboard
from penstock.live.pool_view import pool_view
from penstock.live.pool_watch import PoolWatch
from penstock.live.request_head import HEAD_BYTES_MAX
from penstock.live.status_poller import PoolAddress

pytestmark = pytest.mark.slow

TOKEN = "0123456789abcdef0123456789abcdef"
GRAFANA = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "penstock.json"


class Site:
    """A dashboard's address, and requests to it."""

    def __init__(self, port: int) -> None:
        self.port = port

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

    def wait_for(self, path: str, is_so: Callable[[Any], bool]) -> Any:
        deadline = time.monotonic() + SECONDS_MAX
        while True:
            status, _, content = self.ask(path)
            fields = json.loads(content)
            if status == 200 and is_so(fields):
                return fields
            assert time.monotonic() < deadline, fields
            time.sleep(0.1)

    def say(self, text: bytes, *, until_end: bool = True) -> bytes:
        """Sends bytes and returns all that comes back."""
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
    """Of a second controller, which is the pool's from now on."""
    return Site(port_of(pool.start_controller("--dashboard", "0")))


@pytest.fixture
def guarded(pool: PoolProcesses, tmp_path: Path) -> Site:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    options = ["--dashboard", "0.0.0.0:0", "--dashboard-token-file", str(token)]
    return Site(port_of(pool.start_controller(*options)))


def test_a_pool_is_told_as_json_and_a_killed_worker_as_an_event(
    pool: PoolProcesses, site: Site
) -> None:
    worker = pool.start_worker(processes=2)
    pool.start_training()
    fields = site.wait_for(
        "/api/status",
        lambda status: bool(status["trainers"]) and status["trainers"][0]["batches_per_s"],
    )
    assert fields["endpoint"] == pool.endpoint
    assert fields["totals"]["workers_by_state"]["serving"] == 2
    assert {part["name"] for part in fields["step_parts"]} >= {"compute", "dataset", "wire"}
    trainer_id = fields["trainers"][0]["id"]
    assert fields["trainers"][0]["ledger"]["steps"] > 0
    plan = site.wait_for(f"/api/plan?trainer={trainer_id}", lambda told: told["plan"])["plan"]
    assert {call["where"] for call in plan["calls"]} == {"worker", "trainer"}
    assert any(edge["source"] is None for edge in plan["edges"]) and "calls run" in plan["verdict"]
    # A trainer that had left when the page asked for its plan was an error in the console.
    status, _, content = site.ask("/api/plan?trainer=0123456789abcdef")
    gone = {"trainer": "0123456789abcdef", "plan": None, "has_left": True}
    assert (status, json.loads(content)) == (200, gone)
    status, _, content = site.ask("/api/plan?trainer=0x12")
    assert status == 400 and "an id that /api/status has" in json.loads(content)["error"]
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


def test_metrics_are_those_of_the_pool_in_both_formats(pool: PoolProcesses, site: Site) -> None:
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


def test_pages_have_the_headers_that_keep_others_out(site: Site) -> None:
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


def test_it_changes_nothing_and_has_nothing_else(site: Site) -> None:
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
    assert status == 400 and "since is '-1'" in json.loads(content)["error"]


def test_a_page_under_another_name_is_not_served(site: Site) -> None:
    status, _, content = site.ask("/api/status", Host="evil.example")
    assert status == 421 and b"--dashboard-name" in content
    assert site.say(b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 421")
    assert site.say(b"GET / HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 421")


def test_a_browser_shows_the_token_once_and_gets_a_cookie(guarded: Site) -> None:
    for path in ("/", "/api/status", "/metrics", "/app.js"):
        status, headers, content = guarded.ask(path)
        assert (status, headers["WWW-Authenticate"]) == (401, 'Bearer realm="penstock"')
        assert b"?token=TOKEN" in content and b"Authorization: Bearer" in content
    status, headers, content = guarded.ask("/?token=wrong-wrong-wrong-wrong")
    assert status == 401 and b"is not that of this dashboard" in content
    assert headers["Set-Cookie"] is None
    status, headers, content = guarded.ask(f"/?token={TOKEN}")
    assert status == 200 and b'http-equiv="refresh"' in content and TOKEN.encode() not in content
    assert "HttpOnly" in headers["Set-Cookie"] and "SameSite=Strict" in headers["Set-Cookie"]
    cookie = headers["Set-Cookie"].partition(";")[0]
    assert guarded.ask("/", Cookie=cookie)[0] == 200
    assert guarded.ask("/", Authorization=f"Bearer {TOKEN}")[0] == 200
    assert guarded.ask("/", Authorization=f"Bearer {TOKEN}", Host="evil.example")[0] == 421


@pytest.mark.long
def test_requests_that_are_none_end_and_leave_the_others_alone(site: Site) -> None:
    long = b"x" * (HEAD_BYTES_MAX + 10)
    for text in (
        b"GET /" + long + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + long + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 3000 + b"\r\n",
    ):
        answer = site.say(text)
        assert answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 414")), answer[:100]
        assert b"the request is refused" in answer
    for text in (b"\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        assert b" 200 " not in site.say(text)
    site.say(b"GET / HTTP/1.1\r\n", until_end=False)
    assert site.ask("/index.html")[0] == 200


@pytest.mark.long
def test_many_connections_are_bounded_and_silent_ones_end(site: Site) -> None:
    """A client that sends nothing, and one that sends a byte now and then, keep nobody out for
    long."""
    silent = [
        socket.create_connection(("127.0.0.1", site.port), SECONDS_MAX)
        for _ in range(bounded_server.CONNECTIONS_MAX)
    ]
    try:
        with pytest.raises((AssertionError, OSError)):
            assert site.ask("/index.html")[0] == 200
        answer = site.say(b"")
        assert answer.startswith(b"HTTP/1.1 503") and b"too many connections" in answer
        with pytest.raises(OSError):  # the server ends it
            for _ in range(int(2 * SECONDS_MAX)):
                silent[0].send(b"G")
                time.sleep(0.5)
        for one in silent[1:]:
            assert one.recv(100) == b""
        assert site.ask("/index.html")[0] == 200
    finally:
        for one in silent:
            one.close()


def test_a_scrape_ends_when_its_controller_is_killed(pool: PoolProcesses, site: Site) -> None:
    """Each scrape is whole, or fails; none hangs."""
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


def test_a_pool_that_is_dead_is_told_with_status_503(
    pool: PoolProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_watch, "STALE_S", 0.5)
    dashboard = Dashboard(parse_listen_address("0"), None)
    site = Site(int(dashboard.url.split(":")[2].strip("/")))
    dashboard.start(PoolWatch(PoolAddress(pool.endpoint, None, 0.3)))
    try:
        site.wait_for("/api/status", lambda status: True)
        pool.processes[0].process.kill()
        deadline = time.monotonic() + SECONDS_MAX
        while site.ask("/metrics")[0] == 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for path in ("/metrics", "/api/status", "/api/history", "/api/events"):
            status, headers, content = site.ask(path)
            assert status == 503 and "nothing is known of the pool now" in content.decode()
            assert ("json" in headers["Content-Type"]) == path.startswith("/api/")
        assert site.ask("/")[0] == 200  # the page, which says the same
    finally:
        dashboard.close()


@pytest.mark.parametrize("jump_s", [365 * 86_400, -365 * 86_400])
def test_a_status_is_as_old_as_it_is_whatever_the_clock_is_set_to(
    monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """The status of a dead pool was shown for a year once the clock was set back by one."""
    watch = PoolWatch(PoolAddress("tcp://127.0.0.1:1", None, 0.3))
    now = time.time()
    watch.take(pool_view(status([], []), now))
    monkeypatch.setattr(time, "time", lambda: now + jump_s)
    assert json.loads(watch.status_json())
    monkeypatch.setattr(pool_watch, "STALE_S", -1.0)
    with pytest.raises(PenstockError, match="the last status is 0 s old"):
        watch.status_json()


def test_a_port_that_is_taken_and_other_bad_options_are_told(
    pool: PoolProcesses, site: Site, tmp_path: Path
) -> None:
    token = tmp_path / "readable"
    token.write_text(TOKEN)
    token.chmod(0o644)
    keys = tmp_path / "keys"
    keys.mkdir()
    for options, code, words in (
        (["--dashboard", str(site.port)], 1, "is taken by another process"),
        (["--dashboard", "0.0.0.0:0"], 1, "so it needs a token: add --dashboard-token-file"),
        (["--dashboard", "192.0.2.1:0", "--dashboard-token-file", str(token)], 1, "chmod 600"),
        (["--dashboard", "http"], 2, "PORT or ADDRESS:PORT is expected"),
        (["--dashboard-token-file", str(token)], 2, "need --dashboard PORT"),
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
    assert "is no address of this machine" in process.output


@pytest.mark.long
def test_an_elastic_pool_has_a_dashboard_and_every_query_of_grafana_a_metric(
    pool: PoolProcesses, tmp_path: Path
) -> None:
    options = ["--engine", "local", "--max", "2", "--price", "1", "--budget", "5"]
    process = Process(
        ["up", *options, "--state", str(tmp_path / "state"), "--dashboard", "0"], pool.environment
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
    assert any("workers are wanted" in event["text"] for event in scaled["events"])


def test_a_token_is_nowhere_in_the_log(guarded: Site, pool: PoolProcesses) -> None:
    urllib.request.urlopen(f"http://127.0.0.1:{guarded.port}/?token={TOKEN}", timeout=9).read()
    assert TOKEN not in pool.processes[-1].output
