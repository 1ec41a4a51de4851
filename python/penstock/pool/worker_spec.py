# SPDX-License-Identifier: Apache-2.0
"""The settings of a worker at its start: its peers, its addresses, and its memory limits.

The process that starts pool workers does not load torch, so this module does not either.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import NamedTuple

PATIENCE_S = 60.0
DRAIN_GRACE_S = 30.0  # server::kDrainGrace
_DEFAULT_ARENA_BYTES = 256 << 20
_DEFAULT_JOB_BYTES = 64 << 30
_ANY_HOST = ("*", "0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class PoolWorkerSpec:
    """The addresses and peers of a worker. Without a controller, it serves every holder of the
    key."""

    bind: str
    advertised: str | None
    data_bind: str | None
    data_advertised: str | None
    controller: str | None
    key_folder: str | None
    patience_s: float
    parent_pid: int  # of the process with which it ends
    # A name under which it listens for a trainer on this machine, to hand over batches as slabs.
    handover: str = ""
    # The engine's name for the worker; "" without an engine.
    name: str = ""
    # The powercap tree of this machine, which must report its energy; "" is the default location in
    # Linux, used if it is readable.
    powercap: str = ""
    # The time for finishing its batches once it is to leave.
    grace_s: float = DRAIN_GRACE_S

    @classmethod
    def of_trainer(
        cls, trainer_pid: int, handover: str, key_folder: str | None = None
    ) -> PoolWorkerSpec:
        """Return the settings of a worker that a trainer starts for itself, on loopback. Without
        ``key_folder``, it uses the shared keys of this user, found by its own environment."""
        return cls(
            bind="tcp://127.0.0.1:0",
            advertised=None,
            data_bind=None,
            data_advertised=None,
            controller=None,
            key_folder=key_folder,
            patience_s=PATIENCE_S,
            parent_pid=trainer_pid,
            handover=handover,
        )


class WorkerAddress(NamedTuple):
    bind: str
    advertised: str | None  # None: the bound address. Port 0: the bound port
    data_bind: str | None  # for the chunks of batches. None: any free port of the bound address
    data_advertised: str | None  # None: the bound port on the advertised host


def worker_addresses(
    controller: str,
    bind: str | None,
    advertise: str | None,
    count: int,
    *,
    data_bind: str | None = None,
    data_advertise: str | None = None,
) -> list[WorkerAddress]:
    """Return the addresses of ``count`` processes. Given ports are incremented per process; 0 is
    any free port.

    Look up the controller's host, which can block. Raise ValueError or OSError.
    """
    controller_host, controller_port = _parse_endpoint(controller)
    host, port = (None, 0) if bind is None else _parse_endpoint(bind)
    shown_host, shown_port = _parse_shown("--advertise", advertise)
    data_host, data_port = (None, 0) if data_bind is None else _parse_endpoint(data_bind)
    shown_data_host, shown_data_port = _parse_shown("--data-advertise", data_advertise)
    if host is None:
        host = _address_towards(controller_host, controller_port)
    elif host in _ANY_HOST and shown_host is None:
        shown_host, shown_port = _address_towards(controller_host, controller_port), port
    for name, first in (
        ("--bind", port),
        ("--advertise", shown_port),
        ("--data-bind", data_port),
        ("--data-advertise", shown_data_port),
    ):
        if first + (count - 1 if first else 0) > 65535:
            raise ValueError(
                f"{name} must leave a port up to 65535 for each process, got port {first} and "
                f"{count} processes; use a lower one, or 0 for free ports"
            )
    return [
        WorkerAddress(
            _endpoint(host, _nth_port(port, number)),
            None if shown_host is None else _endpoint(shown_host, _nth_port(shown_port, number)),
            None if data_host is None else _endpoint(data_host, _nth_port(data_port, number)),
            None
            if shown_data_host is None
            else _endpoint(shown_data_host, _nth_port(shown_data_port, number)),
        )
        for number in range(count)
    ]


def _nth_port(port: int, number: int) -> int:
    return port + number if port else 0


def _parse_shown(option: str, endpoint: str | None) -> tuple[str | None, int]:
    if endpoint is None:
        return None, 0
    host, port = _parse_endpoint(endpoint)
    if host in _ANY_HOST:
        raise ValueError(
            f"{option} must name a single host, got {endpoint}; use the name by which trainers "
            f"reach this machine"
        )
    return host, port


def _parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Return the host without brackets, and the port."""
    scheme, separator, rest = endpoint.partition("://")
    host, colon, port = rest.rpartition(":")
    if (scheme, separator) != ("tcp", "://") or not host or not colon or not port.isdecimal():
        raise ValueError(
            f"an address must be tcp://HOST:PORT, such as tcp://10.0.0.5:7000, got {endpoint!r}"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def _endpoint(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to a host. No packet is sent."""
    try:
        found = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise OSError(
            f"the controller's host {host} cannot be resolved ({error}); use a name that this "
            f"machine can resolve, or set the listening address with --bind"
        ) from error
    # The same choice as ZeroMQ's: IPv6 only for hosts without another address.
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as towards:
        towards.connect(address)
        return str(towards.getsockname()[0])


def arena_bytes() -> int:
    """Return the limit of one worker's arena, from PENSTOCK_ARENA_BYTES.

    Raise ValueError if it is not a positive integer.
    """
    return _bytes_from("PENSTOCK_ARENA_BYTES", _DEFAULT_ARENA_BYTES)


def job_bytes() -> int:
    """Return the limit of a single object that a pool worker accepts from a trainer, such as a
    dataset or a folder of modules, from PENSTOCK_JOB_BYTES.

    Raise ValueError if it is not a positive integer.
    """
    return _bytes_from("PENSTOCK_JOB_BYTES", _DEFAULT_JOB_BYTES)


def _bytes_from(variable: str, default: int) -> int:
    text = os.environ.get(variable)
    if text is None:
        return default
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(
            f"{variable} must be a positive number of bytes, such as {default}, got {text!r}"
        )
    return int(text)
