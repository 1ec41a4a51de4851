# SPDX-License-Identifier: Apache-2.0
"""Who may read a dashboard: tokens, host names, addresses; and the answers to the others."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from penstock.errors import PenstockError
from penstock.live.dashboard_access import (
    DashboardAccess,
    check_openness,
    check_operator_keys,
    parse_listen_address,
    read_token,
)

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("text", "address", "port", "is_loopback"),
    [
        ("8080", "127.0.0.1", 8080, True),
        ("0", "127.0.0.1", 0, True),
        ("localhost:80", "127.0.0.1", 80, True),
        ("127.0.0.9:80", "127.0.0.9", 80, True),
        ("[::1]:80", "::1", 80, True),
        ("0.0.0.0:80", "0.0.0.0", 80, False),
        ("10.0.0.1:80", "10.0.0.1", 80, False),
        ("[::]:80", "::", 80, False),
    ],
)
def test_listen_address_is_a_port_with_an_optional_host(
    text: str, address: str, port: int, is_loopback: bool
) -> None:
    if text.startswith("localhost"):
        address = socket.getaddrinfo("localhost", 80, type=socket.SOCK_STREAM)[0][4][0]
    parsed = parse_listen_address(text)
    assert (parsed.address, parsed.port, parsed.is_loopback) == (address, port, is_loopback)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be PORT or ADDRESS:PORT"),
        ("http", "must be PORT or ADDRESS:PORT"),
        ("65536", "must be PORT or ADDRESS:PORT"),
        ("-1", "must be PORT or ADDRESS:PORT"),
        (":80", "must be PORT or ADDRESS:PORT"),
        ("::1:80", "must have its IPv6 address in brackets"),
        ("no-such-name.invalid:80", "cannot resolve 'no-such-name.invalid'"),
    ],
)
def test_invalid_listen_address_is_rejected(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_listen_address(text)


def test_non_loopback_address_requires_a_token() -> None:
    check_openness(parse_listen_address("8080"))
    with pytest.raises(PenstockError, match=r"0\.0\.0\.0.*leave --dashboard-open out, or"):
        check_openness(parse_listen_address("0.0.0.0:8080"))


def token_file(folder: Path, content: str | bytes, mode: int = 0o600) -> str:
    path = folder / "token"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(mode)
    return str(path)


def test_token_is_read_from_a_private_one_line_file(tmp_path: Path) -> None:
    assert read_token(token_file(tmp_path, f"{TOKEN}\n")) == TOKEN
    assert read_token(token_file(tmp_path, TOKEN, 0o400)) == TOKEN


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_token_file_accessible_to_others_is_rejected(tmp_path: Path, mode: int) -> None:
    path = token_file(tmp_path, TOKEN, mode)
    with pytest.raises(PenstockError, match=rf"{mode:04o}.*chmod 600 {path}"):
        read_token(path)


@pytest.mark.parametrize(
    "content",
    ["", "short\n", "0123456789 abcdef\n", f"{TOKEN}\n{TOKEN}\n", b"\xff" * 32, "x" * 600],
)
def test_malformed_token_is_rejected(tmp_path: Path, content: str | bytes) -> None:
    with pytest.raises(
        PenstockError, match="must contain one line of 16 to 512 letters.*openssl rand"
    ):
        read_token(token_file(tmp_path, content))


def test_unreadable_token_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="No such file.*create one with"):
        read_token(str(tmp_path / "missing"))
    with pytest.raises(PenstockError, match="Is a directory.*create one with"):
        read_token(str(tmp_path))


def access(token: str | None = None, address: str = "8080") -> DashboardAccess:
    return DashboardAccess(parse_listen_address(address), token, ["Pool.Example.org"])


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "localhost:8080", "LOCALHOST:1", "127.0.0.1:8080", "[::1]:8080", "10.1.2.3",
        "pool.example.org", "pool.example.org.:443", socket.gethostname(),
    ],
)  # fmt: skip
def test_own_host_names_and_addresses_are_served(host: str) -> None:
    assert access().refusal_of_host([host]) is None


@pytest.mark.parametrize(
    "hosts",
    [
        [], [""], ["evil.example"], ["localhost.evil.example"], ["evil.example:8080"],
        ["localhost", "localhost"], ["localhost@evil.example"], ["127.0.0.1.evil.example"],
        ["[::1"], ["a b"], ["\x1b[2J"],
    ],
)  # fmt: skip
def test_unknown_host_is_rejected_with_advice(hosts: list[str]) -> None:
    refusal = access().refusal_of_host(hosts)
    assert refusal is not None and refusal.status == 421
    assert "--dashboard-name" in refusal.sentence and refusal.sentence.isprintable()


def test_token_is_accepted_as_bearer_or_as_cookie() -> None:
    guarded = access(TOKEN)
    cookie = guarded.set_cookie().partition(";")[0]
    assert TOKEN not in cookie
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(guarded.set_cookie().split("; "))
    assert guarded.refusal_of_credentials(f"Bearer {TOKEN}", None) is None
    assert guarded.refusal_of_credentials(f"bearer  {TOKEN}", None) is None
    assert guarded.refusal_of_credentials(None, cookie) is None
    assert guarded.refusal_of_credentials(None, f"a=b; {cookie}; c=d") is None
    assert access().refusal_of_credentials(None, None) is None


def test_token_in_the_url_is_checked() -> None:
    assert access(TOKEN).refusal_of_token(TOKEN) is None
    for given in ("", TOKEN[:-1], f"{TOKEN}x", "\udcff"):
        refusal = access(TOKEN).refusal_of_token(given)
        assert refusal is not None and refusal.status == 401
        assert "--dashboard-token-file" in refusal.sentence


def test_cookies_of_two_dashboards_coexist() -> None:
    both = [access(TOKEN), access(TOKEN[::-1])]
    cookies = "; ".join(one.set_cookie().partition(";")[0] for one in both)
    assert all(one.refusal_of_credentials(None, cookies) is None for one in both)
    assert both[0].cookie_name != both[1].cookie_name


@pytest.mark.parametrize(
    ("authorization", "cookie"),
    [
        (None, None),
        ("", ""),
        (f"Basic {TOKEN}", None),
        (f"Bearer {TOKEN}x", None),
        (f"Bearer {TOKEN[:-1]}", None),
        ("Bearer \udcff\udcfe", None),
        (None, f"{DashboardAccess(parse_listen_address('0'), TOKEN, []).cookie_name}={TOKEN}"),
        (None, f"{DashboardAccess(parse_listen_address('0'), TOKEN, []).cookie_name}="),
    ],
)
def test_request_without_a_valid_token_gets_instructions(
    authorization: str | None, cookie: str | None
) -> None:
    refusal = access(TOKEN).refusal_of_credentials(authorization, cookie)
    assert refusal is not None and refusal.status == 401
    assert "?token=TOKEN" in refusal.sentence and "Authorization: Bearer" in refusal.sentence


def test_key_folder_requires_the_operator_secret(tmp_path: Path) -> None:
    check_operator_keys(None)
    with pytest.raises(PenstockError, match=r"has no\s+operator.secret"):
        check_operator_keys(str(tmp_path))
    (tmp_path / "operator.secret").touch()
    check_operator_keys(str(tmp_path))
