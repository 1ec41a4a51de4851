# SPDX-License-Identifier: Apache-2.0
"""The options of a command that runs a controller for the dashboard of its pool."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator

from penstock.cli.command_parser import CommandError, CommandParser
from penstock.live.dashboard_access import (
    ListenAddress,
    check_openness,
    check_operator_keys,
    parse_listen_address,
    read_token,
)
from penstock.pool.pool_log import PoolLog

# Of a dashboard: is called once the controller listens at the given endpoint.
StartDashboard = Callable[[str, PoolLog], None]

_TIMEOUT_S = 3.0  # of a status


def add_dashboard(parser: CommandParser) -> None:
    parser.add_argument(
        "--dashboard",
        type=_listen_address,
        metavar="[ADDRESS:]PORT",
        help="serve a dashboard and the metrics of the pool over HTTP; for this machine alone, "
        "unless an ADDRESS is given; port 0 is a free one, which is printed (default: none)",
    )
    parser.add_argument(
        "--dashboard-token-file",
        metavar="FILE",
        help="file with the token that readers of the dashboard show; others must not be able to "
        "read it; an ADDRESS that others reach needs one",
    )
    parser.add_argument(
        "--dashboard-name",
        action="append",
        default=[],
        metavar="NAME",
        help="further name under which browsers open the dashboard, such as that of a proxy; may "
        "be given several times",
    )


@contextlib.contextmanager
def dashboard_of(args: argparse.Namespace, command: str) -> Iterator[StartDashboard]:
    """The dashboard that the options of add_dashboard() and add_keys() ask for, if they do so.
    It listens from the beginning on, serves once it is started, and ends here."""
    if args.dashboard is None:
        if args.dashboard_token_file or args.dashboard_name:
            raise CommandError("the other options of a dashboard need --dashboard PORT", command)
        yield lambda endpoint, log: None
        return
    # Here, since the other commands of a pool do without.
    from penstock.live.dashboard_server import Dashboard
    from penstock.live.pool_watch import PoolWatch
    from penstock.live.status_poller import PoolAddress

    has_token = args.dashboard_token_file is not None
    check_openness(args.dashboard, has_token)
    check_operator_keys(args.keys)
    token = read_token(args.dashboard_token_file) if has_token else None
    dashboard = Dashboard(args.dashboard, token, args.dashboard_name)

    def start(endpoint: str, log: PoolLog) -> None:
        dashboard.start(PoolWatch(PoolAddress(_reached_at(endpoint), args.keys, _TIMEOUT_S)))
        log.say(f"the dashboard is at {dashboard.url}, its metrics at {dashboard.url}metrics")

    try:
        yield start
    finally:
        dashboard.close()


def _reached_at(endpoint: str) -> str:
    """A controller that listens at all addresses of its machine is reached at the machine's own."""
    for everywhere, own in (("//0.0.0.0:", "//127.0.0.1:"), ("//[::]:", "//[::1]:")):
        endpoint = endpoint.replace(everywhere, own)
    return endpoint


def _listen_address(text: str) -> ListenAddress:
    """A type of argparse's."""
    try:
        return parse_listen_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
