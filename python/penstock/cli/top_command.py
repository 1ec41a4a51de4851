# SPDX-License-Identifier: Apache-2.0
"""The command that shows a pool while it works: top."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from penstock.cli.command_parser import CommandError, CommandParser, carry_out, seconds
from penstock.cli.pool_commands import ADDRESS, add_controller, controller_of
from penstock.live.status_poller import PoolAddress, ask_pool
from penstock.live.top_frame import frame_text
from penstock.live.top_rows import as_json

_DEFAULT_INTERVAL_S = 1.0


def run_command(command: str, arguments: Sequence[str]) -> int:
    """Carries out a command of this module; returns the exit code. Raises CommandError for
    arguments that the command does not take."""
    return carry_out(_COMMANDS, command, arguments)


def _top(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "top",
        f"top [--controller {ADDRESS}] [--once [--json]] [OPTION ...]",
        """\
Shows the jobs of a pool with their ranks, its workers, where the time of a step goes, and what
happens, on the whole terminal. Keys are those of htop; F1 lists them. It changes nothing.""",
        """\
examples:
  penstock top --controller tcp://127.0.0.1:7000
  penstock top --once
  penstock top --once --json > pool.json""",
    )
    add_controller(parser)
    parser.add_argument("--once", action="store_true", help="print one frame as text, and end")
    parser.add_argument(
        "--json", action="store_true", help="with --once: print what is known, for programs"
    )
    parser.add_argument("--tree", action="store_true", help="begin with ranks below their jobs")
    parser.add_argument(
        "--interval",
        type=seconds(0.1),
        default=_DEFAULT_INTERVAL_S,
        metavar="SECONDS",
        help=f"time between two looks (default: {_DEFAULT_INTERVAL_S:g})",
    )
    parser.add_argument(
        "--no-color",
        action="store_true",
        help="use bold and reverse letters alone (default: colours, unless NO_COLOR is set)",
    )
    args = parser.parse(arguments)
    if args.json and not args.once:
        raise CommandError("--json needs --once", "top")
    address = PoolAddress(controller_of(parser, args), args.keys, args.timeout)
    if args.once:
        view = ask_pool(address)
        if args.json:
            print(json.dumps(as_json(view), indent=2))
        else:
            print(frame_text(view, is_tree=args.tree))
        return 0
    # Here, since a Python without curses can still print a frame.
    from penstock.live.top_screen import check_terminal, run_screen

    check_terminal()
    signal.signal(signal.SIGTERM, _end)
    run_screen(
        address,
        ask_pool(address),
        interval_s=args.interval,
        with_colours=not (args.no_color or os.environ.get("NO_COLOR")),
        is_tree=args.tree,
    )
    return 0


def _end(number: int, _: object) -> NoReturn:
    """Ends by way of Python, so that the terminal is put back."""
    sys.exit(128 + number)


_COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {"top": _top}
