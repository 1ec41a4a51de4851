# SPDX-License-Identifier: Apache-2.0
"""Access to a dashboard: its listening address, its host names and its token. The decisions on
requests are pure."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import PenstockError

_TOKEN_BYTES_MIN, _TOKEN_BYTES_MAX = 16, 512
_MAKE_TOKEN = "(umask 077; openssl rand -hex 32 > FILE)"
_WHICH_TOKEN = (
    "the token in the file given to the controller with --dashboard-token-file, or else the token "
    "that the controller's log points to"
)


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """An address to listen at: ``host`` as given by the user, ``address`` as resolved."""

    host: str
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.address else socket.AF_INET


def parse_listen_address(text: str) -> ListenAddress:
    """Parse PORT, ADDRESS:PORT or [ADDRESS]:PORT. Raises ValueError with a sentence."""
    expected = f"must be PORT or ADDRESS:PORT, such as 8080 or 10.0.0.1:8080, got {text!r}"
    host, colon, port = text.rpartition(":")
    host = host if colon else "127.0.0.1"
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"must have its IPv6 address in brackets, as in [::1]:8080, got {text!r}")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError(expected)
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(
            f"must be the address of a known host, got {text!r}: cannot resolve {host!r} ({error})"
        ) from None
    return ListenAddress(host, str(found[0][4][0]).partition("%")[0], int(port))


def read_token(path: str) -> str:
    """Return the token in a file that only its owner can read. Raises PenstockError."""
    make = f"create one with {_MAKE_TOKEN}"
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise PenstockError(f"the token file {path} must be a regular file; {make}")
            if status.st_mode & 0o077:
                raise PenstockError(
                    f"the token file {path} can be read or written by others (mode "
                    f"{status.st_mode & 0o777:04o}); restrict it with chmod 600 {path}, and "
                    f"create a new token if another user may have read this one: {_MAKE_TOKEN}"
                )
            if status.st_uid not in (0, os.geteuid()):
                raise PenstockError(
                    f"the token file {path} must belong to root or to this user, got user "
                    f"{status.st_uid}; {make}"
                )
            content = file.read(_TOKEN_BYTES_MAX + 2)
    except OSError as error:
        raise PenstockError(
            f"cannot read the token file {path} ({error.strerror}); {make}"
        ) from None
    token = content.decode("ascii", "replace").removesuffix("\n")
    if not re.fullmatch(rf"[!-~]{{{_TOKEN_BYTES_MIN},{_TOKEN_BYTES_MAX}}}", token):
        raise PenstockError(
            f"the token file {path} must contain one line of {_TOKEN_BYTES_MIN} to "
            f"{_TOKEN_BYTES_MAX} letters, digits and signs, got {len(content)} bytes of other "
            f"content; {make}"
        )
    return token


def check_openness(address: ListenAddress) -> None:
    """Raise PenstockError if other machines can reach a dashboard that has no token."""
    if not address.is_loopback:
        raise PenstockError(
            f"other machines can reach a dashboard at {address.host}, so it needs a token: leave "
            f"--dashboard-open out, or listen on this machine only (--dashboard {address.port})"
        )


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to a rejected request."""

    status: int
    sentence: str


class DashboardAccess:
    """Decides on requests. Immutable after construction."""

    def __init__(self, address: ListenAddress, token: str | None, names: Sequence[str]) -> None:
        """Accept further ``names`` under which browsers reach the dashboard, such as a proxy's
        name."""
        own = {"localhost", socket.gethostname(), address.host}
        self._names: Collection[str] = {name.lower().rstrip(".") for name in (*own, *names)}
        self._token = token
        self.has_token = token is not None
        # Not the token itself, so that a reader of cookies cannot use it as a bearer token.
        # Browsers keep cookies per host name, and dashboards at other ports of that host have other
        # tokens.
        self._cookie = hashlib.sha256(f"penstock dashboard {token}".encode()).hexdigest()
        name = hashlib.sha256(f"penstock cookie {token}".encode()).hexdigest()
        self.cookie_name = f"penstock_{name[:12]}"

    def refusal_of_host(self, hosts: Sequence[str]) -> Refusal | None:
        """Reject unknown host names: a foreign page can make its host name resolve to this address
        (DNS rebinding) and would then share the origin. A numeric address cannot be rebound."""
        host = hosts[0] if len(hosts) == 1 else ""
        name = _name_of_host(host)
        if name is not None and (_is_address(name) or name in self._names):
            return None
        shown = re.sub(r"[^!-~]", "?", host)[:100]
        return Refusal(
            421,
            f"the name in the request's Host, {shown!r}, is not a name of this dashboard; open it "
            "by its address, or start the controller with --dashboard-name and that name",
        )

    def refusal_of_token(self, given: str) -> Refusal | None:
        """Check the token in a request's address."""
        if self._token is not None and _is_same(given, self._token):
            return None
        return Refusal(401, f"the token in the address is wrong; use {_WHICH_TOKEN}")

    def refusal_of_credentials(
        self, authorization: str | None, cookie: str | None
    ) -> Refusal | None:
        """Check a request's headers, if present. The comparison takes constant time."""
        if self._token is None:
            return None
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() == "bearer" and _is_same(given.strip(), self._token):
            return None
        if any(_is_same(value, self._cookie) for value in self._cookies(cookie or "")):
            return None
        return Refusal(
            401,
            f"this dashboard requires a token, {_WHICH_TOKEN}: open it once with ?token=TOKEN at "
            "the end of its address; programs send the header Authorization: Bearer TOKEN",
        )

    def set_cookie(self) -> str:
        """Return the Set-Cookie header for a browser that has shown the token."""
        return f"{self.cookie_name}={self._cookie}; Path=/; HttpOnly; SameSite=Strict"

    def _cookies(self, header: str) -> list[str]:
        pairs = (part.strip().partition("=") for part in header.split(";"))
        return [value for name, _, value in pairs if name == self.cookie_name]


def _is_same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(
        hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest(),
        hashlib.sha256(wanted.encode()).digest(),
    )


def _name_of_host(host: str) -> str | None:
    """Return the host name without the port; None if ``host`` is invalid."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?", host)
    return match[1].strip("[]").lower().rstrip(".") if match else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def check_operator_keys(keys: str | None) -> None:
    """Raise PenstockError if ``keys`` cannot be used to ask the controller for its status."""
    if keys is not None and not (Path(keys) / "operator.secret").exists():
        raise PenstockError(
            f"the dashboard queries the controller as an operator, and {keys} has no "
            "operator.secret; copy the pool's operator.secret to this folder"
        )
