# SPDX-License-Identifier: Apache-2.0
"""The commands that run a program of the user's: run, explain."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence

from penstock.cli.command_parser import CommandError, CommandParser, did_you_mean, one_of
from penstock.cli.program import ProgramError, run_file, run_module

_PROGRAM_USAGE = """\
{command} [OPTION ...] PROGRAM.py [ARGUMENT ...]
{command} [OPTION ...] -m MODULE [ARGUMENT ...]"""


def run_command(command: str, arguments: Sequence[str]) -> int:
    """Carries out a command of this module; returns the exit code. Raises CommandError for
    arguments that the command does not take, and the program's exceptions, SystemExit included."""
    return _COMMANDS[command](arguments)


def _run(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "run",
        _PROGRAM_USAGE.format(command="run"),
        """\
Runs a Python program as python does, with penstock's DataLoader in the place of torch's. The
program, its arguments and the frameworks that it uses stay as they are. What follows the program
is for the program.""",
        """\
With PENSTOCK_POOL=tcp://HOST:PORT the program's loaders get their batches from the workers of the
pool whose controller is there.

examples:
  penstock run train.py --epochs 3
  penstock run -m package.train
  torchrun --nproc-per-node 2 --no-python penstock run train.py""",
    )
    parser.add_argument(
        "--code",
        action="append",
        default=[],
        metavar="PATH",
        help="send the modules of this folder or file to a pool's workers, beside the program's "
        "own; may be given several times (default: PENSTOCK_CODE_PATHS)",
    )
    options, program = parser.parse_before_program(arguments)
    start = _start_of(program, parser.command)
    if options.code:
        _name_code_paths(options.code, parser.command)
    with _named_if_missing(program):
        start()
    return 0


def _explain(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "explain",
        _PROGRAM_USAGE.format(command="explain"),
        """\
Runs a program as `penstock run` does until it first calls a model with a batch of a DataLoader.
Then it ends the program and prints what of that model could run in the data workers, what has to
stay in the trainer, why, and what it costs.

Standard output is the plan alone; what the program prints goes to standard error.""",
        """\
The exit code is 0 when there is a plan (also one that says why nothing moves), 1 when the program
called no model with a batch, and the program's own when it fails.

examples:
  penstock explain train.py --epochs 3
  penstock explain --format json train.py > plan.json
  penstock explain --format dot -m package.train | dot -Tsvg -o plan.svg""",
    )
    parser.add_argument(
        "--format",
        type=one_of(("text", "json", "dot")),
        default="text",
        metavar="FORMAT",
        help="print the plan as a table (text), as JSON (json) or as a graph for Graphviz (dot) "
        "(default: text)",
    )
    parser.add_argument(
        "--cut",
        type=one_of(("auto", "maximal", "none")),
        metavar="CUT",
        help="plan the cheapest cut (auto), a cut that moves all that can move (maximal), or no "
        "cut (none) (default: that of the program's own penstock.offload, else auto)",
    )
    options, program = parser.parse_before_program(arguments)
    start = _start_of(program, parser.command)
    # It watches models by means of Dynamo, which no other command needs.
    from penstock.cli.explained_program import explain_program

    with _named_if_missing(program):
        return explain_program(start, options.format, options.cut)


def _name_code_paths(paths: Sequence[str], command: str) -> None:
    from penstock.pool.travelling_code import name_code_paths  # arguments that only a pool needs

    for path in paths:
        if not os.path.exists(path):
            raise CommandError(
                f"--code names {path!r}, which is not there; a folder or a .py file is expected",
                command,
            )
    name_code_paths(paths)


_COMMANDS = {"run": _run, "explain": _explain}


def _start_of(program: list[str], command: str) -> Callable[[], None]:
    """The call that runs the program."""
    match program:
        case ["-m", module, *rest]:
            return functools.partial(run_module, module, rest)
        case ["-m"]:
            raise CommandError("-m is to be followed by the name of a module", command)
        case [path, *rest]:
            return functools.partial(run_file, path, rest)
        case _:
            raise CommandError("the program is missing: name a file, or a module with -m", command)


@contextlib.contextmanager
def _named_if_missing(program: list[str]) -> Iterator[None]:
    """A program that there is not is an error of the call."""
    try:
        yield
    except ProgramError as error:
        folder, name = os.path.split(program[0])
        meant = ""
        with contextlib.suppress(OSError):
            if name.endswith(".py"):
                files = [file for file in os.listdir(folder or ".") if file.endswith(".py")]
                meant = did_you_mean(name, files)
        raise CommandError(f"{error}{meant}", None) from error
