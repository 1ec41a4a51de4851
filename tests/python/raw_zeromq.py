# SPDX-License-Identifier: Apache-2.0
"""Sockets of libzmq without penstock's code: they act as a foreign program could at a pool's ports.
The records follow csrc/wire/PROTOCOL.md, and are written by hand."""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import hashlib
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Any

DEALER, ROUTER = 5, 6
_LINGER, _SNDHWM, _RCVTIMEO, _SNDTIMEO, _RCVMORE, _LAST_ENDPOINT = 17, 23, 27, 28, 13, 32
_RECONNECT_IVL = 18
_PLAIN_USERNAME, _PLAIN_PASSWORD = 45, 46
_CURVE_SERVER, _CURVE_PUBLICKEY, _CURVE_SECRETKEY, _CURVE_SERVERKEY = 47, 48, 49, 50
_SNDMORE = 2
_PART_BYTES_MAX = 9 << 20
CONTROL_VERSION, POOL_VERSION = 9, 10
SECRET = bytes(range(16))  # of a run


def _library() -> Any:
    # By its name if the system's library index lacks it.
    library = ctypes.CDLL(ctypes.util.find_library("zmq") or "libzmq.so.5", use_errno=True)
    library.zmq_ctx_new.restype = ctypes.c_void_p
    library.zmq_socket.restype = ctypes.c_void_p
    return library


class RawSocket:
    """A socket with a separate context. None of its calls takes longer than the timeout."""

    def __init__(self, kind: int, timeout_s: float = 10.0) -> None:
        self._zmq = _library()
        self._context = ctypes.c_void_p(self._zmq.zmq_ctx_new())
        self._socket = ctypes.c_void_p(self._zmq.zmq_socket(self._context, kind))
        self._set(_LINGER, 0)
        self._set(_SNDHWM, 0)
        self.set_timeout(timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        for option in (_RCVTIMEO, _SNDTIMEO):
            self._set(option, int(timeout_s * 1000))

    def _set(self, option: int, value: int | bytes) -> None:
        data = struct.pack("<i", value) if isinstance(value, int) else value
        self._check(self._zmq.zmq_setsockopt(self._socket, option, data, len(data)))

    def _check(self, result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result

    def use_password(self, name: str, password: str) -> None:
        self._set(_PLAIN_USERNAME, name.encode())
        self._set(_PLAIN_PASSWORD, password.encode())

    def use_key(self, keys: Path, role: str, server_role: str) -> None:
        self._set(_CURVE_SERVERKEY, _key(keys, f"{server_role}.public"))
        self._set(_CURVE_PUBLICKEY, _key(keys, f"{role}.public"))
        self._set(_CURVE_SECRETKEY, _key(keys, f"{role}.secret"))

    def serve_as(self, keys: Path, role: str) -> None:
        """Serve clients that have the role's public key, without authenticating them."""
        self._set(_CURVE_SERVER, 1)
        self._set(_CURVE_SECRETKEY, _key(keys, f"{role}.secret"))

    def connect(self, endpoint: str) -> None:
        self._check(self._zmq.zmq_connect(self._socket, endpoint.encode()))

    def connect_once_more(self, endpoint: str, number: int) -> None:
        """Make one more connection, from a separate loopback address. It is not restored when it
        ends."""
        self._set(_RECONNECT_IVL, -1)
        source = f"127.9.{number >> 8}.{number & 255}:0"
        self.connect(endpoint.replace("tcp://", f"tcp://{source};"))

    def bind(self) -> str:
        """Bind to a free port of loopback; return the endpoint."""
        self._check(self._zmq.zmq_bind(self._socket, b"tcp://127.0.0.1:*"))
        text = ctypes.create_string_buffer(256)
        size = ctypes.c_size_t(len(text))
        found = self._zmq.zmq_getsockopt(self._socket, _LAST_ENDPOINT, text, ctypes.byref(size))
        self._check(found)
        return text.value.decode()

    def send(self, *parts: bytes) -> None:
        for place, part in enumerate(parts):
            self.send_part(part, is_last=place + 1 == len(parts))

    def send_part(self, part: bytes, is_last: bool) -> None:
        flags = 0 if is_last else _SNDMORE
        self._check(self._zmq.zmq_send(self._socket, part, ctypes.c_size_t(len(part)), flags))

    def receive(self) -> list[bytes]:
        """Return the parts of the next message. Raises BlockingIOError if none arrives in time."""
        buffer = ctypes.create_string_buffer(_PART_BYTES_MAX)
        parts = []
        while True:
            size = ctypes.c_size_t(len(buffer))
            count = self._zmq.zmq_recv(self._socket, buffer, size, 0)
            if count < 0 and ctypes.get_errno() == errno.EINTR:
                continue  # by a signal, for example when a child ends
            self._check(count)
            parts.append(ctypes.string_at(buffer, count))
            more = ctypes.c_int(0)
            size = ctypes.c_size_t(ctypes.sizeof(more))
            found = self._zmq.zmq_getsockopt(
                self._socket, _RCVMORE, ctypes.byref(more), ctypes.byref(size)
            )
            self._check(found)
            if not more.value:
                return parts

    def __enter__(self) -> RawSocket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._zmq.zmq_close(self._socket)
        self._zmq.zmq_ctx_term(self._context)


def _key(keys: Path, name: str) -> bytes:
    """Return a key in Z85, with the trailing zero that libzmq expects."""
    return (keys / name).read_text().strip().encode() + b"\0"


def run_id(keys: Path, role: str, secret: bytes = SECRET) -> int:
    """Return the id of a run with this secret, and with the role's key in that folder."""
    key = key_bytes(keys, f"{role}.public")
    digest = hashlib.sha256(b"penstock run 1" + key + secret).digest()
    return int.from_bytes(digest[:8], "little")


def key_bytes(keys: Path, name: str) -> bytes:
    key = ctypes.create_string_buffer(32)
    decode = _library().zmq_z85_decode
    decode.restype = ctypes.c_void_p
    assert decode(key, _key(keys, name))
    return key.raw


def control(kind: int, *fields: bytes, version: int = CONTROL_VERSION) -> bytes:
    return struct.pack("<IHBB", 0x31434E50, version, kind, 0) + b"".join(fields)


def _text(text: str) -> bytes:
    return struct.pack("<I", len(text)) + text.encode()


# Python jobs, without their torch version.
_OF_PYTHON = struct.pack("<BH", 1, 0)


def worker_report(worker_id: int, endpoint: str, version: int = CONTROL_VERSION) -> bytes:
    head = struct.pack("<QIBQ", worker_id, 1, 0, 0)
    texts = (_text(endpoint), _text("by hand"), bytes(4), _text(""), _text(""))
    stuck_ms, host = bytes(4), struct.pack("<HHQQ", 0, 0, 0, 0)
    rest = (_OF_PYTHON, stuck_ms, host, bytes(16), _text(""), SECRET)
    return control(1, head, *texts, *rest, version=version)


def trainer_report(trainer_id: int) -> bytes:
    return control(
        3,
        struct.pack("<QIIIIQQQB31Q", trainer_id, 1, 0, 1, 1, 0, 0, 0, 0, *[0] * 31),
        _text("j"),
        _text(""),
        _OF_PYTHON,
        struct.pack("<QII", 0, 0, 1),  # alone, without other ranks
        SECRET,
    )


def drain_request(worker_id: int) -> bytes:
    return control(8, struct.pack("<Q", worker_id))


STATUS_REQUEST = control(6)
REFUSAL = 10  # its kind


def farewell_of_worker(worker_id: int) -> bytes:
    return control(5, struct.pack("<QB", worker_id, 1), SECRET)


def farewell_of_trainer(trainer_id: int) -> bytes:
    return control(5, struct.pack("<QB", trainer_id, 0), SECRET)


def hello(trainer_id: int, version: int = POOL_VERSION, link: int = 1) -> bytes:
    offer = bytes([3]) + bytes(32)  # of keys for the chunks of batches
    head = _head(0x31574E50, version, kind=1, own_id=trainer_id, link=link)
    return head + bytes(56) + offer + SECRET


def welcome(worker_id: int, version: int = POOL_VERSION) -> bytes:
    return _head(0x31544E50, version, kind=1, own_id=worker_id) + bytes(88)


def _head(magic: int, version: int, kind: int, own_id: int, link: int = 1) -> bytes:
    """Return a head with a stamp of 1; the fields that only one side has follow it."""
    return struct.pack("<IHBBQIIQ", magic, version, kind, 0, own_id, link, 1, 1)
