# SPDX-License-Identifier: Apache-2.0
"""The command ``penstock env``: what a report of a fault needs to say about the machine."""

from __future__ import annotations

import json
from collections.abc import Sequence

from penstock.cli.command_parser import CommandParser, carry_out
from penstock.cli.environment_report import Report, environment_report

_NAME_COLUMNS = 22


def run_command(command: str, arguments: Sequence[str]) -> int:
    """Carries the command out; returns the exit code. Raises CommandError for arguments that it
    does not take."""
    return carry_out({command: _environment_command}, command, arguments)


def _environment_command(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "env",
        "env [--json]",
        """\
Prints what a report of a fault needs: the versions of penstock, torch, CUDA, Python and the
libraries of the system, which native part is used, the limits on CPUs, memory and files, and the
environment variables that matter. Values that may be secret are left out, and the home directory is
written ~. Nothing is sent anywhere.""",
    )
    parser.add_argument("--json", action="store_true", help="print an object of JSON")
    args = parser.parse(arguments)
    report = environment_report()
    print(json.dumps(report, indent=2) if args.json else _text(report))
    return 0


def _text(report: Report) -> str:
    lines = []
    for section, facts in report.items():
        lines.append(section)
        for name, value in facts.items():
            first, *rest = value or [""]
            lines.append(f"  {name:<{_NAME_COLUMNS}}{first}".rstrip())
            lines += [f"  {'':<{_NAME_COLUMNS}}{line}" for line in rest]
    return "\n".join(lines)
