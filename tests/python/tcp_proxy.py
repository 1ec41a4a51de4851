# SPDX-License-Identifier: Apache-2.0
"""A proxy on loopback for tests: it forwards the connections of one port with the faults that are
requested.

Faults are placed in the stream, not in time: each affects a connection after a number of bytes in
one direction since the previous fault. So a fault hits the same place of an exchange on a slow
machine as on a fast one. The proxy is a separate process, which keeps the descriptors of its
connections out of the test's process; its handle sends it commands as lines of JSON and reads one
answer for each.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

SECONDS_MAX = 60.0
TO_CLIENT = "to client"
TO_SERVER = "to server"

RESET = "reset"  # both sides see the connection reset, by RST
TRUNCATE = "truncate"  # both sides see the connection end, by FIN, with bytes not forwarded
SILENCE = "silence"  # no traffic in either direction for some seconds, then a reset
STALL = "stall"  # the same, but then it continues
FLIP = "flip"  # a bit in an encrypted frame changes
RESIZE = "resize"  # a long frame claims to be longer still; its length is not protected

_READ_BYTES = 1 << 16
_WAITING_BYTES_MAX = 1 << 16
# The first bytes of a ZeroMQ frame with CURVE, and of a batch's chunk on a data connection, with
# the distance from there to encrypted bytes. Flags and length precede them.
_MARKS = {b"\x07MESSAGE": 8 + 8 + 1, b"PNP1": 64 + 8}
_LENGTH_BYTES = 8
_IS_LONG = 0x02


class TcpProxy:
    """The handle of a proxy's process. Its port is bound from the start; the server's endpoint is
    set later. Thread-safe."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._turn = threading.Lock()
        self.endpoint: str = self._read()["endpoint"]

    def lead_to(self, endpoint: str) -> None:
        """Set the server for new connections. Until then, connections are closed immediately."""
        self._send_command("lead_to", endpoint=endpoint)

    def limit(self, bytes_per_s: float | None = None, send_bytes_max: int = _READ_BYTES) -> None:
        """Limit the rate of each direction of a connection, and the bytes of each send."""
        self._send_command("limit", bytes_per_s=bytes_per_s, send_bytes_max=send_bytes_max)

    def inject(
        self, kind: str, after_bytes: int, way: str = TO_CLIENT, seconds: float = 0.0
    ) -> None:
        """Plan a fault, after the planned ones. It happens ``after_bytes`` bytes in this direction
        after the previous one; only one fault at a time is counted down."""
        self._send_command("inject", kind=kind, way=way, after_bytes=after_bytes, seconds=seconds)

    @property
    def injected(self) -> list[str]:
        """Return the faults that have happened since the last clear_faults, in order."""
        return list(self._send_command("state")["injected"])

    def wait_injected(self) -> None:
        """Wait until all planned faults have happened."""
        left = self._send_command("wait")["planned"]
        assert not left, f"{left} faults were not carried out within {SECONDS_MAX:g} s"

    def clear_faults(self) -> None:
        """Remove all limits, faults and records."""
        self._send_command("clear_faults")

    def close(self) -> None:
        with self._turn:
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process.wait(SECONDS_MAX)
            if self._process.stdout is not None:
                self._process.stdout.close()

    def _send_command(self, command: str, **arguments: Any) -> dict[str, Any]:
        with self._turn:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
            return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the proxy ended with exit code {self._process.wait(SECONDS_MAX)}"
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def open_proxy() -> Iterator[TcpProxy]:
    proxy = TcpProxy()
    try:
        yield proxy
    finally:
        proxy.close()


@dataclass
class _Fault:
    kind: str
    way: str
    after_bytes: int
    seconds: float


@dataclass
class _Flow:
    """One direction of a connection."""

    way: str
    source: socket.socket
    sink: socket.socket
    waiting: bytearray = field(default_factory=bytearray)
    ready_at: float = 0.0
    is_ended: bool = False  # the source has closed it


@dataclass
class _Connection:
    flows: tuple[_Flow, _Flow]
    held_until: float = 0.0
    is_to_reset: bool = False  # at the end of the hold

    @property
    def sockets(self) -> tuple[socket.socket, socket.socket]:
        return self.flows[0].source, self.flows[1].source

    def end(self, by_reset: bool) -> None:
        for one in self.sockets:
            if by_reset:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                with contextlib.suppress(OSError):  # the other side may be gone
                    one.shutdown(socket.SHUT_WR)
            one.close()


class _Server:
    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._target: tuple[str, int] | None = None
        self._connections: list[_Connection] = []
        self._faults: deque[_Fault] = deque()
        self._injected: list[str] = []
        self._awaited_until: float | None = None  # a client waits for the faults
        self._bytes_per_s: float | None = None
        self._send_bytes_max = _READ_BYTES

    @property
    def endpoint(self) -> str:
        return "tcp://{}:{}".format(*self._listener.getsockname())

    def serve(self) -> None:
        """Serve until standard input ends."""
        self._answer({"endpoint": self.endpoint})
        commands = sys.stdin.fileno()
        pending = b""
        while True:
            ready = self._wait(commands)
            if commands in ready:
                read = _read_some(commands)
                if not read:
                    break
                *lines, pending = (pending + read).split(b"\n")
                for line in lines:
                    self._run_command(json.loads(line))
            if self._listener.fileno() in ready:
                self._accept()
            for connection in list(self._connections):
                try:
                    self._serve(connection, ready)
                except OSError:  # one side is gone, and the other side is ended in the same way
                    self._end(connection, by_reset=True)
            if self._awaited_until is not None:
                if not self._faults or time.monotonic() >= self._awaited_until:
                    self._awaited_until = None
                    self._answer_state()
        for connection in list(self._connections):
            self._end(connection, by_reset=False)
        self._listener.close()

    def _answer(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), flush=True)

    def _answer_state(self) -> None:
        self._answer({"injected": self._injected, "planned": len(self._faults)})

    def _run_command(self, order: dict[str, Any]) -> None:
        command = order.pop("command")
        if command == "lead_to":
            host, _, port = order["endpoint"].removeprefix("tcp://").rpartition(":")
            self._target = (host, int(port))
        elif command == "limit":
            self._bytes_per_s = order["bytes_per_s"]
            self._send_bytes_max = order["send_bytes_max"]
        elif command == "inject":
            self._faults.append(_Fault(**order))
        elif command == "clear_faults":
            self._faults.clear()
            self._injected.clear()
            self._bytes_per_s = None
            self._send_bytes_max = _READ_BYTES
        elif command == "wait":
            self._awaited_until = time.monotonic() + SECONDS_MAX
            return  # the answer follows after the last fault
        self._answer_state()

    def _wait(self, commands: int) -> set[int]:
        """Return the ready descriptors, as soon as there are any or the next deadline is
        reached."""
        now = time.monotonic()
        events: dict[int, int] = {commands: select.POLLIN, self._listener.fileno(): select.POLLIN}
        times = [] if self._awaited_until is None else [self._awaited_until]
        for connection in self._connections:
            if connection.held_until > now:
                times.append(connection.held_until)
                continue
            if connection.is_to_reset:
                times.append(now)
            for flow in connection.flows:
                if len(flow.waiting) < _WAITING_BYTES_MAX and not flow.is_ended:
                    number = flow.source.fileno()
                    events[number] = events.get(number, 0) | select.POLLIN
                if flow.waiting and flow.ready_at <= now:
                    number = flow.sink.fileno()
                    events[number] = events.get(number, 0) | select.POLLOUT
                elif flow.waiting:
                    times.append(flow.ready_at)
        poll = select.poll()
        for number, mask in events.items():
            poll.register(number, mask)
        timeout_ms = max(0.0, min(times) - now) * 1000 + 1 if times else None
        return {number for number, _ in poll.poll(timeout_ms)}

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            if self._target is None:
                raise ConnectionRefusedError
            server = socket.create_connection(self._target, SECONDS_MAX)
        except OSError:
            client.close()
            return
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.setblocking(False)
        flows = (_Flow(TO_SERVER, client, server), _Flow(TO_CLIENT, server, client))
        self._connections.append(_Connection(flows))

    def _end(self, connection: _Connection, by_reset: bool) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            connection.end(by_reset)

    def _serve(self, connection: _Connection, ready: set[int]) -> None:
        now = time.monotonic()
        if connection.held_until > now:
            return
        if connection.is_to_reset:
            return self._end(connection, by_reset=True)
        for flow in connection.flows:
            if flow.source.fileno() in ready and not flow.is_ended:
                if len(flow.waiting) < _WAITING_BYTES_MAX:
                    with contextlib.suppress(BlockingIOError):
                        read = flow.source.recv(_READ_BYTES)
                        flow.waiting += read
                        flow.is_ended = not read
            if flow.waiting and flow.ready_at <= now and not self._forward(connection, flow, now):
                return
            if flow.is_ended and not flow.waiting:
                return self._end(connection, by_reset=False)

    def _forward(self, connection: _Connection, flow: _Flow, now: float) -> bool:
        """Send the bytes that may be sent. Returns False if the connection is not to continue
        now."""
        left = self._send_bytes_max if self._bytes_per_s else _WAITING_BYTES_MAX
        while flow.waiting and left > 0:
            count = min(len(flow.waiting), self._send_bytes_max, left)
            fault = self._faults[0] if self._faults and self._faults[0].way == flow.way else None
            if fault is not None and fault.after_bytes == 0:
                if not self._inject_fault(fault, connection, flow, now):
                    return False
                continue
            if fault is not None:
                count = min(count, fault.after_bytes)
            try:
                sent = flow.sink.send(flow.waiting[:count])
            except BlockingIOError:
                return True
            del flow.waiting[:sent]
            left -= sent
            if fault is not None:
                fault.after_bytes -= sent
            if self._bytes_per_s:
                flow.ready_at = max(flow.ready_at, now - 0.01) + sent / self._bytes_per_s
        return True

    def _inject_fault(
        self, fault: _Fault, connection: _Connection, flow: _Flow, now: float
    ) -> bool:
        """Carry the fault out. Returns False if the connection is not to continue now."""
        if fault.kind in (FLIP, RESIZE) and not _damage(flow.waiting, fault.kind):
            fault.after_bytes = len(flow.waiting)  # no frame starts here; the next one is hit
            return True
        self._faults.popleft()
        self._injected.append(fault.kind)
        if fault.kind in (FLIP, RESIZE):
            return True
        if fault.kind in (RESET, TRUNCATE):
            self._end(connection, by_reset=fault.kind == RESET)
            return False
        connection.held_until = now + fault.seconds
        connection.is_to_reset = fault.kind == SILENCE
        return False


def _damage(waiting: bytearray, kind: str) -> bool:
    """Change a bit of the first frame that starts here, or of the first long one's length. Returns
    False if there is none."""
    if kind == FLIP:
        place, clear_bytes = _find_mark(waiting, 0)
        target = place + clear_bytes
        if place < 0 or target >= len(waiting):
            return False
        waiting[target] ^= 0x10
        return True
    place, _ = _find_mark(waiting, 1 + _LENGTH_BYTES)
    while place >= 0:
        length = place - _LENGTH_BYTES
        if waiting[length - 1] & _IS_LONG and not any(waiting[length : length + 4]):
            waiting[length + 3] ^= 0x40  # 2^38 bytes more
            return True
        place, _ = _find_mark(waiting, place + 1)
    return False


def _find_mark(waiting: bytearray, start: int) -> tuple[int, int]:
    """Return the position of the first mark from ``start`` on, -1 if there is none, and the number
    of clear bytes after it."""
    places = [(waiting.find(mark, start), clear) for mark, clear in _MARKS.items()]
    return min((place for place in places if place[0] >= 0), default=(-1, 0))


def _read_some(number: int) -> bytes:
    with open(number, "rb", buffering=0, closefd=False) as stream:
        return stream.read(_READ_BYTES) or b""


if __name__ == "__main__":
    _Server().serve()
