# SPDX-License-Identifier: Apache-2.0
"""Hosts that jobs without a network may still reach: the syntax of ``--job-hosts``, and which
requests and addresses it covers.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass

_NAME = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"  # a part of a name; bucket names may have _
_NAMES = re.compile(rf"{_NAME}(?:\.{_NAME})*")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[^][:@/?#\s]{1,253}):([0-9]{1,5})")
# Cloud metadata services, from which machines get credentials, whose addresses are not link-local.
_METADATA = frozenset(("fd00:ec2::254", "100.100.100.200"))


@dataclass(frozen=True, slots=True)
class JobHost:
    """A host and a port. ``name`` is in lower case; an address is in its canonical form."""

    name: str
    port: int
    is_address: bool = False

    @staticmethod
    def parse(text: str) -> JobHost:
        """Parse HOST:PORT. Raise ValueError."""
        found = _AUTHORITY.fullmatch(text)
        if found is None or not 0 < int(found[2]) < 1 << 16:
            raise ValueError(f"{text!r} is no HOST:PORT")
        name = found[1].removeprefix("[").removesuffix("]").removesuffix(".").lower()
        try:
            return JobHost(str(ipaddress.ip_address(name)), int(found[2]), is_address=True)
        except ValueError:
            # If the last part is a number, the system may parse the name as an address.
            is_name = _NAMES.fullmatch(name) and not name.rpartition(".")[2].isdigit()
            if found[1].startswith("[") or not is_name:
                raise ValueError(f"{text!r} has no name of a host and no address") from None
        return JobHost(name, int(found[2]))

    def __str__(self) -> str:
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"


def parse_named(text: str) -> str:
    """Parse a host as an operator names it, optionally with a leading ``*.`` for all names below
    it. Return its canonical form; raise ValueError."""
    wildcard = "*." if text.startswith("*.") else ""
    host = JobHost.parse(text.removeprefix(wildcard))
    if wildcard and host.is_address:
        raise ValueError(f"{text!r} has * before an address")
    return f"{wildcard}{host}"


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
    return str(ip) in _METADATA or _is_of_this_machine(ip)


def _is_of_this_machine(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether this machine has the address: the system reaches its addresses from
    themselves. No packet is sent."""
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        try:
            trial.connect((str(ip), 9))
        except OSError:  # no route to it
            return False
        return bool(ipaddress.ip_address(trial.getsockname()[0]) == ip)
