# SPDX-License-Identifier: Apache-2.0
"""The dashboard options of a command that runs a pool's controller."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.cli.command_parser import CommandError, CommandParser
from penstock.errors import PenstockError
from penstock.live.dashboard_access import (
    ListenAddress,
    check_openness,
    check_operator_keys,
    parse_listen_address,
    read_token,
)
from penstock.pool.pool_log import PoolLog

# Starts a dashboard: called once the controller listens at the given endpoint.
StartDashboard = Callable[[str, PoolLog], None]

_TIMEOUT_S = 3.0  # for a status request
_TOKEN_BYTES = 16  # of a generated token


def add_dashboard(parser: CommandParser) -> None:
    parser.add_argument(
        "--dashboard",
        type=_listen_address,
        metavar="[ADDRESS:]PORT",
        help="serve a dashboard and the metrics of the pool over HTTP, on this machine only "
        "unless ADDRESS is given; port 0 selects a free port, which is printed (default: no "
        "dashboard)",
    )
    parser.add_argument(
        "--dashboard-token-file",
        metavar="FILE",
        help="file with the token that readers of the dashboard must present; other users must "
        "not be able to read it (default: a generated token; the log shows how to open the "
        "dashboard with it)",
    )
    parser.add_argument(
        "--dashboard-open",
        action="store_true",
        help="require no token: every user of this machine can then read the dashboard, which "
        "shows only the first digits of ids; not allowed with an ADDRESS that other machines can "
        "reach",
    )
    parser.add_argument(
        "--dashboard-name",
        action="append",
        default=[],
        metavar="NAME",
        help="additional host name under which browsers open the dashboard, such as the name of a "
        "proxy; may be given several times",
    )


@contextlib.contextmanager
def dashboard_of(args: argparse.Namespace, command: str) -> Iterator[StartDashboard]:
    """Yield the dashboard that the options of add_dashboard() and add_keys() request, if any. It
    listens immediately, serves once it is started, and is closed on exit."""
    if args.dashboard is None:
        if args.dashboard_token_file or args.dashboard_name or args.dashboard_open:
            raise CommandError("the other dashboard options require --dashboard PORT", command)
        yield lambda endpoint, log: None
        return
    if args.dashboard_open and args.dashboard_token_file:
        raise CommandError(
            "--dashboard-open and --dashboard-token-file are mutually exclusive; leave one out",
            command,
        )
    # Imported here, as the other commands of a pool do not need it.
    from penstock.live.dashboard_server import Dashboard
    from penstock.live.pool_view import PoolAddress
    from penstock.live.pool_watch import PoolWatch

    if args.dashboard_open:
        check_openness(args.dashboard)
    check_operator_keys(args.keys)
    with contextlib.ExitStack() as stack:
        token, how_to_open = _token_of(args, stack)
        dashboard = Dashboard(args.dashboard, token, args.dashboard_name)
        stack.callback(dashboard.close)

        def start(endpoint: str, log: PoolLog) -> None:
            address = PoolAddress(_local_endpoint(endpoint), args.keys, _TIMEOUT_S)
            dashboard.start(PoolWatch(address, shows_ids=token is not None))
            log.info(f"the dashboard is at {dashboard.url}, its metrics at {dashboard.url}metrics")
            if how_to_open:
                log.info(f"open the dashboard at {dashboard.url}?token={how_to_open}")

        yield start


def _token_of(args: argparse.Namespace, stack: contextlib.ExitStack) -> tuple[str | None, str]:
    """Return the token and the text about it for the log, if it was generated: on a terminal the
    token itself, and elsewhere a file with it, since others may read a log."""
    if args.dashboard_open:
        return None, ""
    if args.dashboard_token_file is not None:
        return read_token(args.dashboard_token_file), ""
    import secrets  # imported here, as the other commands of a pool do not need it
    import tempfile

    token = secrets.token_hex(_TOKEN_BYTES)
    if sys.stdout.isatty():
        return token, token
    try:
        fd, path = tempfile.mkstemp(prefix=f"penstock-dashboard-{os.getpid()}-", suffix=".token")
        stack.callback(Path(path).unlink, missing_ok=True)
        with open(fd, "w") as file:
            file.write(f"{token}\n")
    except OSError as error:
        raise PenstockError(
            f"cannot write a dashboard token to {tempfile.gettempdir()} ({error.strerror}); name "
            "a token file with --dashboard-token-file"
        ) from None
    return token, f"$(cat {path})"


def _local_endpoint(endpoint: str) -> str:
    """Return the machine's address for a controller that listens at all addresses of its
    machine."""
    for everywhere, own in (("//0.0.0.0:", "//127.0.0.1:"), ("//[::]:", "//[::1]:")):
        endpoint = endpoint.replace(everywhere, own)
    return endpoint


def _listen_address(text: str) -> ListenAddress:
    """Parse a listening address, as an argparse type."""
    try:
        return parse_listen_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
