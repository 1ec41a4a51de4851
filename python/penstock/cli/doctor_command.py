# SPDX-License-Identifier: Apache-2.0
"""The command ``penstock doctor``: what limits a program, and what makes it faster."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from penstock.cli.command_parser import (
    FAILED_EXIT_CODE,
    CommandError,
    CommandParser,
    carry_out,
    seconds,
    whole_number,
)

_STEPS = 60
_SECONDS = 20.0
_TIMEOUT_S = 600.0
_TRIALS = 5
INTERRUPTED_EXIT_CODE = 130


def run_command(command: str, arguments: Sequence[str]) -> int:
    """Carries the command out; returns the exit code. Raises CommandError for arguments that it
    does not take."""
    return carry_out({command: _doctor}, command, arguments)


def _doctor(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "doctor",
        "doctor [OPTION ...] PROGRAM.py [ARGUMENT ...]\n"
        "doctor [OPTION ...] -m MODULE [ARGUMENT ...]",
        f"""\
Says what limits a program, and what makes it faster. Runs the program as `penstock run` does, ends
it after some steps of its busiest loader, and prints what limits it. Then it runs the program again
with other options of that loader, and prints what was predicted and what was measured.

The program's files stay as they are, and its batches are those that it has without doctor: options
that change their order are named, and tried with --allow-reordering alone. The program runs up to
{_TRIALS + 2} times, each time from its beginning and without a terminal, and its output is not
shown.""",
        """\
The exit code is 0 when there is a diagnosis, and 1 when there is none or the program cannot be run
twice.

examples:
  penstock doctor train.py --epochs 3
  penstock doctor --trials 0 train.py
  penstock doctor --json -m package.train > diagnosis.json""",
    )
    parser.add_argument(
        "--steps",
        type=whole_number(2, 100_000),
        default=_STEPS,
        metavar="N",
        help=f"measure at least so many steps in a run (default: {_STEPS})",
    )
    parser.add_argument(
        "--seconds",
        type=seconds(0.5),
        default=_SECONDS,
        metavar="S",
        help=f"measure no longer than this, and fewer steps then (default: {_SECONDS:g})",
    )
    parser.add_argument(
        "--trials",
        type=whole_number(0, 50),
        default=_TRIALS,
        metavar="K",
        help=f"try at most so many changes, each in a run of its own (default: {_TRIALS})",
    )
    parser.add_argument(
        "--timeout",
        type=seconds(1),
        default=_TIMEOUT_S,
        metavar="S",
        help=f"end a run that takes longer (default: {_TIMEOUT_S:g})",
    )
    parser.add_argument(
        "--allow-reordering",
        action="store_true",
        help="also try options that change the order of the batches",
    )
    parser.add_argument("--json", action="store_true", help="print an object of JSON")
    options, program = parser.parse_before_program(arguments)
    if not program or program == ["-m"]:
        raise CommandError("the program is missing: name a file, or a module with -m", "doctor")
    if program[0] != "-m" and not os.path.exists(program[0]):
        raise CommandError(f"there is no file {program[0]!r} to run", "doctor")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise CommandError(
            "doctor was started as one of several ranks, and each would run the program again and "
            "again; start it once, by itself, for a program of one rank",
            "doctor",
        )
    signal.signal(signal.SIGTERM, _end_on_signal)
    try:
        return _examine(program, options)
    except KeyboardInterrupt:
        print("penstock doctor: interrupted; all that it had started has ended", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE


def _examine(program: Sequence[str], options: object) -> int:
    # Here, since it imports torch: a command that was called wrongly ends without it.
    from penstock.doctor import examination, findings
    from penstock.doctor.program_runs import ProgramRuns
    from penstock.doctor.run_orders import RunResult
    from penstock.tuning.loader_settings import LoaderSettings

    asked = vars(options)
    command = [sys.executable, "-m", "penstock.cli.doctored_program", *program]
    runs = ProgramRuns(command, asked["steps"], asked["seconds"], asked["timeout"])
    allow_reordering: bool = asked["allow_reordering"]

    _say("a run of the program as it is")
    found = examination.first_look(runs.run())
    if examination.is_worth_a_plan(found):
        _say("a run that looks for what of the model could run in the workers")
        examination.note_movable(found, runs.run(asks_for_plan=True), allow_reordering)
    else:
        examination.note_movable(found, None, allow_reordering)
    if not asked["json"]:
        print(findings.diagnosis_text(found) + "\n", flush=True)

    def run(settings: LoaderSettings, base: LoaderSettings, loader: int) -> RunResult:
        moves = settings.offload and not base.offload
        return runs.run(loader, settings.changes_from(base), moves)

    examination.try_changes(found, run, asked["trials"], allow_reordering, _say)
    if asked["json"]:
        print(json.dumps(findings.as_record(found), indent=2))
    else:
        print(findings.changes_text(found))
    return FAILED_EXIT_CODE if found.cannot_repeat else 0


def _say(text: str) -> None:
    print(f"penstock doctor: {text}", file=sys.stderr, flush=True)


def _end_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
