# SPDX-License-Identifier: Apache-2.0
"""The addresses of one host's workers, for listening and for trainers on other machines."""

from __future__ import annotations

import socket
from typing import NamedTuple

_ANY_HOST = ("*", "0.0.0.0", "::")


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
    controller_host, controller_port = _parse(controller)
    host, port = (None, 0) if bind is None else _parse(bind)
    shown_host, shown_port = _parse_shown("--advertise", advertise)
    data_host, data_port = (None, 0) if data_bind is None else _parse(data_bind)
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
                f"{name} begins with port {first}, and {count} processes need one each, up to "
                f"65535; begin with a lower one, or with 0 for free ports"
            )
    return [
        WorkerAddress(
            _text(host, _nth(port, number)),
            None if shown_host is None else _text(shown_host, _nth(shown_port, number)),
            None if data_host is None else _text(data_host, _nth(data_port, number)),
            None
            if shown_data_host is None
            else _text(shown_data_host, _nth(shown_data_port, number)),
        )
        for number in range(count)
    ]


def _nth(port: int, number: int) -> int:
    return port + number if port else 0


def _parse_shown(option: str, endpoint: str | None) -> tuple[str | None, int]:
    if endpoint is None:
        return None, 0
    host, port = _parse(endpoint)
    if host in _ANY_HOST:
        raise ValueError(
            f"{option} is {endpoint}, which names no single host; name the one that trainers "
            f"reach this machine by"
        )
    return host, port


def _parse(endpoint: str) -> tuple[str, int]:
    """Return the host without brackets, and the port."""
    scheme, separator, rest = endpoint.partition("://")
    host, colon, port = rest.rpartition(":")
    if (scheme, separator) != ("tcp", "://") or not host or not colon or not port.isdecimal():
        raise ValueError(
            f"{endpoint!r} is no address; tcp://HOST:PORT is expected, such as tcp://10.0.0.5:7000"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def _text(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to a host. No packet is sent."""
    try:
        found = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise OSError(
            f"the controller's host {host} cannot be looked up ({error}); name it as this machine "
            f"knows it, or say with --bind where this worker listens"
        ) from error
    # The same choice as ZeroMQ's: IPv6 only for hosts without another address.
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as towards:
        towards.connect(address)
        return str(towards.getsockname()[0])
