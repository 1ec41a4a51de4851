# SPDX-License-Identifier: Apache-2.0
"""The HTTP proxy through which jobs without a network reach the hosts that the operator has named.
It is a separate process (job_place.py), outside the jobs' network namespaces.

A job requests a tunnel (CONNECT), or a resource by its complete address (GET http://...). The proxy
resolves names itself and connects only to addresses that it has checked. All input from a job is
bounded: connections, the head of a request, and the time to send it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import re
import resource
import signal
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock import _pool
from penstock.pool.job_isolation import JobHost, JobIsolation
from penstock.pool.job_place import MESSAGE
from penstock.pool.pool_log import PoolLog

JOB_CONNECTIONS_MAX = 128  # further ones wait in the system's queue, which is bounded, too
CONNECTIONS_MAX = 1024
_OWN_DESCRIPTORS = 64  # in addition to the descriptors of connections
HEAD_BYTES_MAX = 8 << 10
HEAD_S = 10.0
_RESOLVE_S_MAX = 20.0
_CONNECT_S_MAX = 10.0  # for each address
_ADDRESSES_MAX = 4  # tried for each name
_ANSWER_S_MAX = 2.0  # for a job to read a response of the proxy
_PAUSE_S = 0.1  # if the system has no descriptor for a connection
_PIECE_BYTES = 64 << 10  # in each direction of a connection
_LOGGED_HOSTS_MAX = 256
_WORDS_MAX = 300  # of a response, which may quote the request

_REQUEST = re.compile(r"([A-Z]{1,32}) (\S+) (HTTP/1\.[01])")
_RESOURCE = re.compile(r"http://([^/?#]+)([/?]\S*)?", re.IGNORECASE)
_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):(.*)")
# Headers of the connection to the proxy, not of the request. Host is rewritten.
_HOP_FIELDS = frozenset(
    ("connection", "host", "keep-alive", "proxy-authorization", "proxy-connection", "upgrade")
)
# Cloud metadata services, from which machines get credentials, whose addresses are not link-local.
_METADATA = frozenset(("fd00:ec2::254", "100.100.100.200"))


def run_proxy(isolation: Mapping[str, Any], fd: int) -> None:
    """Serve until the warm process at the other end of ``fd`` has ended."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # draining workers still need the proxy
    _pool.raise_descriptor_limit()
    plan = JobIsolation(**isolation)
    # The isolation that all jobs share: the proxy cannot read keys, either.
    bounded = replace(plan, no_network="", has_private_tmp=False, data_bytes=None)
    replace(bounded, descriptor_count=None, process_count=None).separation().separate()
    asyncio.run(_Proxy(NamedHosts(plan.hosts), PoolLog("penstock worker")).run(fd))


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a job."""

    host: JobHost
    forward: bytes  # the part of the head to forward; empty for a tunnel

    @staticmethod
    def parse(head: str) -> Request:
        """Parse ``head``, which ends before its empty line. Raise ValueError."""
        line, *fields = head.split("\r\n")
        found = _REQUEST.fullmatch(line)
        if found is None:
            raise ValueError("the request has no HTTP/1.1 request line")
        method, target = found[1], found[2]
        if method == "CONNECT":
            return Request(JobHost.parse(target), b"")
        resource_found = _RESOURCE.fullmatch(target)
        if resource_found is None:
            raise ValueError("the request is neither CONNECT nor for an http:// address")
        authority, path = resource_found[1], resource_found[2] or "/"
        host = JobHost.parse(authority if re.search(r":\d+$", authority) else f"{authority}:80")
        kept = [f"{method} {'' if path.startswith('/') else '/'}{path} {found[3]}"]
        kept += [f"Host: {authority}", "Connection: close"]
        for field in fields:
            named = _FIELD.fullmatch(field)
            if named is None:
                raise ValueError("the request has an invalid header field")
            if named[1].lower() not in _HOP_FIELDS:
                kept.append(field)
        return Request(host, "\r\n".join([*kept, "", ""]).encode("latin-1"))


class _Refusal(Exception):
    """An error response of the proxy. Clients show the text next to its code."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        words = words[:_WORDS_MAX]
        self.answer = (
            f"HTTP/1.1 {code} {words}\r\nContent-Type: text/plain\r\nConnection: close\r\n"
            f"Content-Length: {len(words) + 1}\r\n\r\n{words}\n"
        ).encode("ascii", "replace")


class _Proxy:
    """Confined to the thread of its event loop."""

    def __init__(self, named: NamedHosts, log: PoolLog) -> None:
        self._named = named
        self._log = log
        self._logged: set[str] = set()
        self._jobs: dict[int, asyncio.Task[None]] = {}
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = max(1, (descriptors - _OWN_DESCRIPTORS) // 2)
        self._slots = asyncio.Semaphore(min(CONNECTIONS_MAX, room))

    async def run(self, fd: int) -> None:
        """Serve; end the process when the other end of ``fd`` is closed."""
        is_over = asyncio.Event()
        control = socket.socket(fileno=fd)
        control.setblocking(False)

        def handle_message() -> None:
            if not self._handle_message(control):
                is_over.set()

        asyncio.get_running_loop().add_reader(control, handle_message)
        await is_over.wait()
        os._exit(0)  # without waiting for threads that resolve names

    def _handle_message(self, control: socket.socket) -> bool:
        """Read one message; return whether more can follow."""
        try:
            message, fds, *_ = socket.recv_fds(control, MESSAGE.size, 1)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        if len(message) != MESSAGE.size:
            return False
        begins, job = MESSAGE.unpack(message)
        if begins and fds:
            listener = socket.socket(fileno=fds[0])
            listener.setblocking(False)
            self._jobs[job] = asyncio.create_task(self._listen(listener))
        elif task := self._jobs.pop(job, None):
            task.cancel()
        return True

    async def _listen(self, listener: socket.socket) -> None:
        """Serve a job until cancelled."""
        loop = asyncio.get_running_loop()
        own_slots = asyncio.Semaphore(JOB_CONNECTIONS_MAX)
        serving: set[asyncio.Task[None]] = set()

        def end(task: asyncio.Task[None]) -> None:
            serving.discard(task)
            own_slots.release()

        with listener:
            try:
                while True:
                    await own_slots.acquire()
                    client = await _accepted(loop, listener)
                    task = loop.create_task(self._serve(client))
                    serving.add(task)
                    task.add_done_callback(end)
            finally:
                for task in serving:
                    task.cancel()

    async def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            async with self._slots:
                try:
                    await self._pass_on(client)
                except _Refusal as refusal:
                    await _answer(asyncio.get_running_loop(), client, refusal.answer)

    async def _pass_on(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        request, rest = await _request_of(loop, client)
        with await self._connected(request.host) as server:
            if not request.forward:
                await loop.sock_sendall(client, b"HTTP/1.1 200 Connected\r\n\r\n")
            await loop.sock_sendall(server, request.forward + rest)
            await _relay(loop, client, server)

    async def _connected(self, host: JobHost) -> socket.socket:
        loop = asyncio.get_running_loop()
        if not self._named.has(host):
            self._log_once(host, "which --job-hosts does not name")
            raise _Refusal(403, f"--job-hosts of the worker does not name {host}")
        trouble: str | None = None
        for family, address in await self._resolved(host):
            server = socket.socket(family, socket.SOCK_STREAM)
            try:
                server.setblocking(False)
                server.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await asyncio.wait_for(loop.sock_connect(server, address), _CONNECT_S_MAX)
                return server
            except (OSError, asyncio.TimeoutError) as error:
                server.close()
                trouble = trouble or str(error) or "no answer"
            except BaseException:
                server.close()
                raise
        raise _Refusal(502, f"{host} cannot be reached: {trouble}")

    async def _resolved(self, host: JobHost) -> Sequence[tuple[int, Any]]:
        """Return the address families and addresses that the host may resolve to."""
        loop = asyncio.get_running_loop()
        lookup = loop.getaddrinfo(host.name, host.port, type=socket.SOCK_STREAM)
        try:
            found = await asyncio.wait_for(lookup, _RESOLVE_S_MAX)
        except (OSError, UnicodeError, asyncio.TimeoutError) as error:
            raise _Refusal(502, f"{host} has no address: {error or 'no answer'}") from None
        allowed = [
            (family, address)
            for family, _, _, _, address in found
            if host.is_address or not is_denied(str(address[0]))
        ]
        if not allowed:
            self._log_once(host, "a name of --job-hosts that resolves to this machine")
            words = f"{host} resolves to an address of the worker's machine"
            raise _Refusal(403, f"{words}; --job-hosts must name the address")
        return allowed[:_ADDRESSES_MAX]

    def _log_once(self, host: JobHost, why: str) -> None:
        if str(host) in self._logged or len(self._logged) > _LOGGED_HOSTS_MAX:
            return
        self._logged.add(str(host))
        self._log.warn(
            f"a job was refused a connection to {host}, {why}; this is logged once per host"
        )
        if len(self._logged) > _LOGGED_HOSTS_MAX:
            self._log.warn("further refused hosts are not logged")


async def _accepted(loop: asyncio.AbstractEventLoop, listener: socket.socket) -> socket.socket:
    while True:
        try:
            client, _ = await loop.sock_accept(listener)
            break
        except OSError:  # the process or the machine has no descriptor for it
            await asyncio.sleep(_PAUSE_S)
    client.setblocking(False)
    with contextlib.suppress(OSError):
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


async def _request_of(
    loop: asyncio.AbstractEventLoop, client: socket.socket
) -> tuple[Request, bytes]:
    """Return the request, and the bytes received after its head."""
    with _refused_if_late(408, "the head of the request did not arrive in time"):
        head, rest = await asyncio.wait_for(_head(loop, client), HEAD_S)
    try:
        return Request.parse(head.decode("latin-1")), rest
    except ValueError as error:
        raise _Refusal(400, str(error)) from None


async def _head(loop: asyncio.AbstractEventLoop, client: socket.socket) -> tuple[bytes, bytes]:
    found = b""
    while (end := found.find(b"\r\n\r\n")) < 0 and len(found) <= HEAD_BYTES_MAX:
        piece = await loop.sock_recv(client, HEAD_BYTES_MAX)
        if not piece:
            raise ConnectionResetError
        found += piece
    if not 0 <= end <= HEAD_BYTES_MAX:
        raise _Refusal(431, f"the head of the request is longer than {HEAD_BYTES_MAX} bytes")
    return found[:end], found[end + 4 :]


@contextlib.contextmanager
def _refused_if_late(code: int, words: str) -> Iterator[None]:
    try:
        yield
    except asyncio.TimeoutError:
        raise _Refusal(code, words) from None


async def _relay(
    loop: asyncio.AbstractEventLoop, client: socket.socket, server: socket.socket
) -> None:
    """Copy in both directions until the server has finished sending."""
    asking = asyncio.ensure_future(_copy(loop, client, server))
    try:
        await _copy(loop, server, client)
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def _copy(
    loop: asyncio.AbstractEventLoop, source: socket.socket, target: socket.socket
) -> None:
    piece = memoryview(bytearray(_PIECE_BYTES))
    try:
        while count := await loop.sock_recv_into(source, piece):
            await loop.sock_sendall(target, piece[:count])
            await asyncio.sleep(0)  # give other connections a turn if both ends are fast
        target.shutdown(socket.SHUT_WR)
    except OSError:
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)  # ends the other direction, too
        raise


async def _answer(loop: asyncio.AbstractEventLoop, client: socket.socket, answer: bytes) -> None:
    """Send a response, then read the client's remaining data: its system would drop the response
    otherwise."""

    async def exchange() -> None:
        await loop.sock_sendall(client, answer)
        client.shutdown(socket.SHUT_WR)
        while await loop.sock_recv(client, _PIECE_BYTES):
            pass

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(exchange(), _ANSWER_S_MAX)


class NamedHosts:
    """The hosts of ``--job-hosts``."""

    def __init__(self, named: Iterable[str]) -> None:
        """``named`` has hosts as returned by `parse_named`."""
        self._named = frozenset(named)

    def has(self, host: JobHost) -> bool:
        if str(host) in self._named:
            return True
        if host.is_address:
            return False
        parts = host.name.split(".")
        above = (".".join(parts[place:]) for place in range(1, len(parts)))
        return any(f"*.{name}:{host.port}" in self._named for name in above)


def is_denied(address: str) -> bool:
    """Return whether names must not resolve to this address, because it belongs to this machine or
    to internal services of its network: otherwise, a name server could choose such a service."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast:
        return True
    return str(ip) in _METADATA or _is_local_address(ip)


def _is_local_address(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether this machine has the address: the system reaches its addresses from
    themselves. No packet is sent."""
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        try:
            trial.connect((str(ip), 9))
        except OSError:  # no route to it
            return False
        return bool(ipaddress.ip_address(trial.getsockname()[0]) == ip)
