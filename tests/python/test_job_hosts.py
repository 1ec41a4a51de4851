# SPDX-License-Identifier: Apache-2.0
"""The hosts of --job-hosts that jobs without a network can reach: by the rules alone, by a proxy
that receives the requests of a hostile job, and by datasets in a pool."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pool_datasets import CODE
from pool_processes import SECONDS_MAX, PoolProcesses, Worker, pool_of
from torch.utils.data import Dataset

from penstock import DataLoader, Pool, _pool
from penstock.cli.command_parser import CommandError, CommandParser
from penstock.cli.isolation_options import add_isolation, isolation_arguments, isolation_of
from penstock.pool import job_proxy
from penstock.pool.job_isolation import (
    IsolationOptions,
    JobHost,
    JobIsolation,
    parse_named,
    plan_isolation,
)
from penstock.pool.job_place import MESSAGE, JobPlace, ProxyProcess
from penstock.pool.job_proxy import NamedHosts, Request, is_denied

NO_NAMESPACE = _pool.JobSeparation(no_network="namespace", has_loopback=True).refusal()
NO_MOUNTS = _pool.JobSeparation(hiding="mounts", hidden=["/nowhere"]).refusal()
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives processes accounts")
needs_namespace = pytest.mark.skipif(bool(NO_NAMESPACE), reason=NO_NAMESPACE)


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


class Rows(BaseHTTPRequestHandler):
    """Answers with the question."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        asked = f"{self.path} of {self.headers['Host']}, {self.headers['Connection']}"
        self.answer(asked.encode())

    def do_POST(self) -> None:
        self.answer(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def serving() -> Iterator[int]:
    """The port of an HTTP server on loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Rows) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


# ---- Names and addresses


@pytest.mark.parametrize(
    ("text", "usual"),
    [
        ("Data.Example.org:443", "data.example.org:443"),
        ("data.example.org.:443", "data.example.org:443"),
        ("*.amazonaws.com:443", "*.amazonaws.com:443"),
        ("my_bucket.store:9000", "my_bucket.store:9000"),
        ("127.0.0.1:80", "127.0.0.1:80"),
        ("[0:0::1]:80", "[::1]:80"),
    ],
)
def test_named_host_is_normalised(text: str, usual: str) -> None:
    assert parse_named(text) == usual


@pytest.mark.parametrize(
    "text",
    [
        "", "example.org", "example.org:", "example.org:0", "example.org:65536", "example.org:x",
        ":443", "*:443", "a.*.org:443", "*.:443", "*.127.0.0.1:80", "*.1:80", "127.1:80",
        "http://example.org:443", "a b:80", "a/b:80", "user@example.org:443", "::1:80",
        "[example.org]:80", "a..b:80", "-a.org:80", "exämple.org:80", "a\n:80",
    ],
)  # fmt: skip
def test_invalid_host_text_is_rejected(text: str) -> None:
    with pytest.raises(
        ValueError, match="expected HOST:PORT, got|has neither a host|has \\* before"
    ):
        parse_named(text)


@pytest.mark.parametrize(
    ("asked", "is_named"),
    [
        ("data.example.org:443", True),
        ("DATA.example.ORG.:443", True),
        ("data.example.org:80", False),
        ("more.data.example.org:443", False),
        ("example.org:443", False),
        ("bucket.s3.amazonaws.com:443", True),
        ("amazonaws.com:443", False),
        ("evilamazonaws.com:443", False),
        ("amazonaws.com.evil.org:443", False),
        ("127.0.0.1:9000", True),
        ("127.0.0.2:9000", False),
        ("[::ffff:127.0.0.1]:9000", False),
    ],
)
def test_request_is_allowed_by_name_and_port(asked: str, is_named: bool) -> None:
    named = NamedHosts(["data.example.org:443", "*.amazonaws.com:443", "127.0.0.1:9000"])
    assert named.has(JobHost.parse(asked)) is is_named


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.9.9.9", "0.0.0.0", "169.254.169.254", "224.0.0.1", "::1", "::",
        "fe80::1%lo", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "fd00:ec2::254",
        "100.100.100.200",
    ],
)  # fmt: skip
def test_name_may_not_lead_to_an_address_of_the_machine(address: str) -> None:
    assert is_denied(address)


@pytest.mark.parametrize("address", ["192.0.2.1", "10.255.255.1", "2001:db8::1"])
def test_name_may_lead_to_other_machines(address: str) -> None:
    assert not is_denied(address)


def test_name_may_not_lead_to_an_address_of_an_interface() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        try:
            trial.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no other interface")
        assert is_denied(trial.getsockname()[0])


def test_request_is_rewritten_for_its_server() -> None:
    head = (
        "GET HTTP://Data.example.org/a?b HTTP/1.1\r\nHost: other.org\r\nAccept: x\r\n"
        "Proxy-Connection: keep-alive\r\nconnection: keep-alive\r\nProxy-Authorization: y"
    )
    request = Request.parse(head)
    assert request.host == JobHost("data.example.org", 80)
    assert request.forward == (
        b"GET /a?b HTTP/1.1\r\nHost: Data.example.org\r\nConnection: close\r\nAccept: x\r\n\r\n"
    )
    assert Request.parse("GET http://a.org:81?b HTTP/1.0").forward.startswith(b"GET /?b HTTP/1.0\r")
    assert Request.parse("CONNECT a.org:443 HTTP/1.1") == Request(JobHost("a.org", 443), b"")


@pytest.mark.parametrize(
    "head",
    [
        "", "GET", "GET / HTTP/1.1", "GET https://a.org/ HTTP/1.1", "get http://a.org/ HTTP/1.1",
        "GET http://a.org/ HTTP/2", "GET http://u@a.org/ HTTP/1.1", "CONNECT a.org HTTP/1.1",
        "CONNECT http://a.org:443 HTTP/1.1", "GET http://a.org/ HTTP/1.1\r\n folded: x",
        "GET http://a.org/ HTTP/1.1\r\nno field", "GET http://a.org/ HTTP/1.1\nHost: b:1",
        "\x16\x03\x01", "GET http://a.org:1:2/ HTTP/1.1",
    ],
)  # fmt: skip
def test_malformed_request_is_rejected(head: str) -> None:
    with pytest.raises(ValueError, match=r"request|HOST:PORT"):
        Request.parse(head)


# ---- Options


def parsed(*arguments: str) -> IsolationOptions:
    parser = CommandParser("worker", "worker", "")
    add_isolation(parser)
    return isolation_of(parser.parse(list(arguments)))


def test_job_hosts_round_trip_through_the_arguments() -> None:
    arguments = ["--isolate=network", "--job-hosts=*.example.org:443,127.0.0.1:9,[::1]:9"]
    assert isolation_arguments(parsed(*arguments)) == arguments


@pytest.mark.parametrize("text", ["example.org", "a.org:443,", "a.org:443 b.org:443"])
def test_malformed_job_hosts_are_reported(text: str) -> None:
    with pytest.raises(
        CommandError, match=r"--job-hosts must be HOST:PORT entries separated by commas"
    ):
        parsed("--isolate=network", "--job-hosts", text)


def test_job_hosts_require_network_isolation() -> None:
    with pytest.raises(ValueError, match="--job-hosts requires --isolate network"):
        plan_isolation(IsolationOptions(job_hosts=("a.org:443",)), "/nowhere")


class NoLoopback:
    """The isolation of a machine that provides no loopback device."""

    def __init__(self, **settings: Any) -> None:
        self._why = "a loopback device is refused" if settings.get("has_loopback") else ""

    def refusal(self, _: Any = ()) -> str:
        return self._why


def test_job_hosts_without_a_namespace_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter of system calls would leave jobs without access to the proxy."""
    monkeypatch.setattr(_pool, "JobSeparation", NoLoopback)
    options = IsolationOptions(frozenset({"network"}), job_hosts=("a.org:443",))
    with pytest.raises(ValueError, match="does not support: a loopback device is refused; enable"):
        plan_isolation(options, "/nowhere")


@needs_namespace
def test_allowed_hosts_are_reported_at_the_start() -> None:
    options = IsolationOptions(frozenset({"network"}), job_hosts=("a.org:443", "b.org:80"))
    plan = plan_isolation(options, "/nowhere")
    said = (
        "jobs have no network except a.org:443, b.org:80 through a proxy, enforced by a network "
        "namespace"
    )
    assert said in plan.messages
    assert plan.isolation.separation().refusal() == ""


# ---- The proxy


class Proxy:
    """A proxy of one job, whose socket is on the machine's loopback."""

    def __init__(self, hosts: list[str]) -> None:
        self.process = ProxyProcess(JobIsolation(hosts=hosts).fields())
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
            with socket.socket(fileno=os.dup(self.process.fd)) as control:
                socket.send_fds(control, [MESSAGE.pack(True, 1)], [listener.fileno()])

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), SECONDS_MAX)

    def ask(self, request: bytes) -> str:
        """Return its complete answer."""
        with self.connect() as client:
            client.sendall(request)
            return "".join(piece.decode() for piece in iter(lambda: client.recv(4096), b""))


@contextlib.contextmanager
def proxy_to(*hosts: str) -> Iterator[Proxy]:
    proxy = Proxy(list(hosts))
    try:
        yield proxy
    finally:
        assert not proxy.process.has_ended
        proxy.process.close()


@pytest.mark.slow
def test_proxy_forwards_only_to_named_hosts(capfd: pytest.CaptureFixture[str]) -> None:
    with serving() as port, serving() as other, proxy_to(f"127.0.0.1:{port}") as proxy:
        get = f"GET http://127.0.0.1:{port}/rows HTTP/1.1\r\nHost: x\r\n\r\n"
        assert proxy.ask(get.encode()).endswith(f"/rows of 127.0.0.1:{port}, close")
        post = f"POST http://127.0.0.1:{port}/ HTTP/1.1\r\nContent-Length: 5\r\n\r\nab"
        with proxy.connect() as client:
            client.sendall(post.encode())
            client.sendall(b"cde")
            assert client.makefile("rb").read().endswith(b"\r\n\r\nabcde")
        tunnel = f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\nGET /t HTTP/1.0\r\nHost: y\r\n\r\n"
        answer = proxy.ask(tunnel.encode())
        assert answer.startswith("HTTP/1.1 200 Connected\r\n\r\nHTTP/1.1 200 OK")
        assert answer.endswith("/t of y, None")
        for _ in range(2):
            refused = proxy.ask(f"CONNECT 127.0.0.1:{other} HTTP/1.1\r\n\r\n".encode())
            words = f"--job-hosts of the worker does not name 127.0.0.1:{other}"
            assert refused.startswith(f"HTTP/1.1 403 {words}\r\n")
            assert refused.endswith(f"\r\n\r\n{words}\n")
    logged = f"a job was refused a connection to 127.0.0.1:{other}, which --job-hosts does not name"
    assert capfd.readouterr().err.count(logged) == 1


@pytest.mark.slow
def test_name_that_resolves_to_this_machine_is_rejected() -> None:
    with serving() as port, proxy_to(f"localhost:{port}") as proxy:
        answer = proxy.ask(f"GET http://localhost:{port}/ HTTP/1.1\r\n\r\n".encode())
        assert answer.startswith("HTTP/1.1 403 ")
        assert "--job-hosts must name the address" in answer


@pytest.mark.slow
def test_proxy_answers_requests_that_it_cannot_forward() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with proxy_to(f"127.0.0.1:{port}", "missing.invalid:80") as proxy:
            for request, answer in (
                (b"GET / HTTP/1.1\r\n\r\n", "400 "),
                (b"CONNECT " + b"a" * 8000 + b" HTTP/1.1\r\n\r\n", "400 "),
                (b"GET http://a.org/ HTTP/1.1\r\n" + b"x: y\r\n" * 4000, "431 "),
                (b"GET http://a.org/" + b"a" * 8200 + b" HTTP/1.1\r\n\r\n", "431 "),
                (f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode(), "502 127.0.0.1"),
                (b"CONNECT missing.invalid:80 HTTP/1.1\r\n\r\n", "502 missing.invalid:80 has no"),
            ):
                found = proxy.ask(request)
                assert found.startswith(f"HTTP/1.1 {answer}"), (request[:40], found)
                assert len(found) < 1000


def test_incomplete_request_head_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_proxy, "HEAD_S", 0.01)

    async def wait_for_request(client: socket.socket) -> None:
        await job_proxy._request_of(asyncio.get_running_loop(), client)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.sendall(b"GET http://a.org/ HTTP/1.1\r\n")
        with pytest.raises(job_proxy._Refusal, match="did not arrive in time"):
            asyncio.run(wait_for_request(ours))


@pytest.mark.slow
def test_connections_of_a_job_are_bounded_and_end_with_it() -> None:
    """An idle connection keeps further ones waiting, and ends with its job."""
    with serving() as port, proxy_to(f"127.0.0.1:{port}") as proxy, contextlib.ExitStack() as open_:
        tunnel = f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode()
        clients = [open_.enter_context(proxy.connect()) for _ in range(128)]
        for client in clients:
            client.sendall(tunnel)
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        waiting = open_.enter_context(proxy.connect())
        waiting.sendall(tunnel)
        clients[0].close()  # and a waiting one takes its place
        assert waiting.recv(100).startswith(b"HTTP/1.1 200")
        proxy.process.end(1)
        for client in (*clients[1:], waiting):
            assert client.recv(100) == b""
        with pytest.raises(ConnectionRefusedError):
            proxy.connect()


@pytest.mark.slow
@needs_namespace
@pytest.mark.parametrize("uid", [None, pytest.param(70000, marks=needs_root)])
def test_isolated_process_reads_through_the_proxy(uid: int | None) -> None:
    """For any account."""
    with serving() as port, serving() as other:
        isolation = JobIsolation(no_network="namespace", hosts=[f"127.0.0.1:{port}"])
        proxy = ProxyProcess(isolation.fields())
        place = JobPlace(isolation.fields(), uid=uid, job=7, proxy_fd=proxy.fd)
        read(f"http://127.0.0.1:{port}/")  # imports that may fail under the account
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                proxy.close_in_child()
                place.enter()
                urllib.request.install_opener(urllib.request.build_opener())  # of now
                found = [read(f"http://127.0.0.1:{one}/") for one in (port, other)]
                os.write(writing, "\n".join([str(os.getuid()), *found]).encode())
            os._exit(0)
        os.close(writing)
        with open(reading) as result:
            found_uid, named, another = result.read().split("\n")
        os.waitpid(pid, 0)
        proxy.close()
    assert found_uid == str(os.getuid() if uid is None else uid)
    assert named == f"/ of 127.0.0.1:{port}, close"
    assert "403" in another


# ---- In a pool


class Reading(Dataset[dict[str, str]]):
    """Reads by HTTP, and tries neighbouring paths."""

    def __init__(self, port: int, other: int) -> None:
        self.port = port
        self.other = other

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, str]:
        return {
            "read": read(f"http://127.0.0.1:{self.port}/rows"),
            "read another": read(f"http://127.0.0.1:{self.other}/rows"),
            "tunnel": read(f"https://127.0.0.1:{self.other}/rows"),
            "connect": connect(self.port),
            "proxies": " ".join(
                f"{name}={os.environ.get(name)}"
                for stem in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
                for name in (stem, stem.lower())
            ),
        }


def read(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=SECONDS_MAX) as answer:
            return str(answer.read().decode())
    except OSError as error:
        return f"{type(error).__name__}: {error}"


def connect(port: int) -> str:
    try:
        socket.create_connection(("127.0.0.1", port), SECONDS_MAX).close()
    except OSError as error:
        return type(error).__name__
    return "connected"


def found_by(pool: PoolProcesses, port: int, other: int) -> dict[str, str]:
    options: dict[str, Any] = {"batch_size": None, "timeout": 60}
    (found,) = DataLoader(
        Reading(port, other), pool=Pool(pool.endpoint, code_paths=[CODE]), **options
    )
    return dict(found)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def proxies_of(worker: Worker) -> list[int]:
    """The processes of proxies among the worker's descendants."""
    parents: dict[int, int] = {}
    proxies = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = parent_of(int(folder.name))
            if b"penstock.pool.job_proxy" in (folder / "cmdline").read_bytes():
                proxies.append(int(folder.name))

    def is_below(pid: int) -> bool:
        return pid == worker.process.pid or (pid in parents and is_below(parents[pid]))

    return [pid for pid in proxies if is_below(pid)]


def expect_end_of(handle: int) -> None:
    """Wait until the process has ended."""
    assert select.select([handle], [], [], SECONDS_MAX)[0]
    os.close(handle)


@pytest.mark.slow
@needs_namespace
@pytest.mark.parametrize("levels", ["network", "keys,files,tmp,network"])
def test_job_reads_only_from_named_hosts(pool: PoolProcesses, levels: str) -> None:
    """A job had full network access or none, and without it could not read from an object store."""
    with serving() as port, serving() as other:
        worker = pool.start_worker("--isolate", levels, "--job-hosts", f"127.0.0.1:{port}")
        found = found_by(pool, port, other)
    assert found["read"] == f"/rows of 127.0.0.1:{port}, close"
    words = f"403: --job-hosts of the worker does not name 127.0.0.1:{other}"
    assert found["read another"] == f"HTTPError: HTTP Error {words}"
    assert words.replace(":", "", 1) in found["tunnel"]
    assert found["connect"] == "ConnectionRefusedError"
    proxy = "http://127.0.0.1:3128"
    assert found["proxies"] == (
        f"HTTP_PROXY={proxy} http_proxy={proxy} HTTPS_PROXY={proxy} https_proxy={proxy} "
        f"NO_PROXY= no_proxy="
    )
    refused = (
        f"a job was refused a connection to 127.0.0.1:{other}, which --job-hosts does not name"
    )
    assert len(worker.wait_for_lines(lambda line: refused in line)) == 1
    (pid,) = proxies_of(worker)
    if not NO_MOUNTS:
        assert not Path(f"/proc/{pid}/root{_pool.shared_key_folder()}/worker.secret").exists()
    handle = os.pidfd_open(pid)
    assert worker.end() == 0
    expect_end_of(handle)


@pytest.mark.sampled(1)
@pytest.mark.slow
@needs_namespace
@pytest.mark.parametrize("which", ["supervisor", "server", "warm process"])
def test_proxy_ends_with_each_ancestor_process(pool: PoolProcesses, which: str) -> None:
    worker = pool.start_worker("--isolate", "network", "--job-hosts", "127.0.0.1:9")
    (pid,) = proxies_of(worker)
    handle = os.pidfd_open(pid)
    (server,) = worker.pids
    above = {"supervisor": worker.process.pid, "server": server, "warm process": parent_of(pid)}
    killed = above[which]
    os.kill(killed, signal.SIGKILL)
    expect_end_of(handle)
    if which != "supervisor":
        worker.served(2)  # again


@pytest.mark.slow
@needs_namespace
def test_worker_restarts_after_its_proxy_has_ended(pool: PoolProcesses) -> None:
    with serving() as port:
        worker = pool.start_worker("--isolate", "network", "--job-hosts", f"127.0.0.1:{port}")
        (pid,) = proxies_of(worker)
        handle = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        expect_end_of(handle)
        assert found_by(pool, port, port)["read"].startswith("/rows of")
    worker.wait_for_lines(lambda line: "the proxy of --job-hosts has ended" in line)


@pytest.mark.slow
@needs_namespace
def test_spawned_job_reads_from_named_hosts(pool: PoolProcesses) -> None:
    with serving() as port, serving() as other:
        options = ("--isolate=network", f"--job-hosts=127.0.0.1:{port}")
        worker = pool.start_altered_worker("end_after_forks", "9", *options)
        worker.wait_for_lines(lambda line: "jobs are spawned" in line)
        for _ in range(2):
            found = found_by(pool, port, other)
            assert found["read"].startswith("/rows of")
            assert "403" in found["read another"]
