# SPDX-License-Identifier: Apache-2.0
"""The command penstock."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from penstock._version import __version__
from penstock.cli.command_parser import (
    CommandError,
    HelpShown,
    asks_for_json,
    did_you_mean,
    error_record,
    is_output_closed,
)


class Command(NamedTuple):
    # The module with its `run_command`, of this package or by full name. Imported when the command
    # is called.
    home: str
    summary: str


PROGRAM_COMMANDS = {
    "run": Command(
        "program_commands", "run a Python program with penstock's DataLoader instead of torch's"
    ),
    "explain": Command(
        "program_commands",
        "show which parts of a program's model could run in the data workers, and why",
    ),
    "trace": Command(
        "program_commands", "run a program and write a trace of its steps, for Perfetto and Chrome"
    ),
    "merge-traces": Command(
        "program_commands", "merge the traces of several ranks, or of torch.profiler, into one"
    ),
    "doctor": Command(
        "program_commands",
        "find a program's bottleneck, and measure changes that could speed it up",
    ),
    "visits": Command(
        "visits_command", "show whether a run gave each sample once, and where two runs part"
    ),
}
POOL_COMMANDS = {
    "keys": Command("pool_commands", "create the keys of a pool that spans machines"),
    "controller": Command("pool_commands", "run the controller of a pool"),
    "worker": Command("pool_commands", "run worker processes of a pool on this host"),
    "up": Command(
        "elastic_commands", "run a pool that starts and stops workers as its jobs need them"
    ),
    "down": Command(
        "elastic_commands", "stop a pool started by penstock up, including its workers"
    ),
    "status": Command("pool_commands", "show the workers and the jobs of a pool"),
    "top": Command("pool_commands", "show the jobs and workers of a pool, continuously updated"),
    "costs": Command("pool_commands", "show the costs of the jobs of a pool"),
    "drain": Command("pool_commands", "let a worker finish its current batches and leave its pool"),
}
CLUSTER_COMMANDS = {
    "simulate": Command(
        "penstock_simulator.simulate_command",
        "simulate a cluster's jobs under several policies for sharing its CPUs",
    ),
}
MACHINE_COMMANDS = {
    "env": Command("environment_command", "print system information for bug reports"),
    "guide": Command("environment_command", "print the guide for coding assistants"),
}
COMMANDS = {**PROGRAM_COMMANDS, **POOL_COMMANDS, **CLUSTER_COMMANDS, **MACHINE_COMMANDS}
OPTIONS = {
    "--version": "print the version of penstock",
    "--cmake-dir": "print the folder for CMAKE_PREFIX_PATH, for C++ programs",
    "-h, --help": "print this help",
}
# The exit status of Python and its tools for a usage error.
USAGE_EXIT_CODE = 2
# The exit status that a shell reports for a command ended by SIGPIPE.
BROKEN_PIPE_EXIT_CODE = 128 + signal.SIGPIPE
# Commands whose output, and errors in writing it, belong to the program.
_OUTPUT_OF_PROGRAMS = (["run"], ["trace"])


def main() -> int:
    """Run the command in ``sys.argv`` and return the exit code. If the program ends by an
    exception, SystemExit included, this call raises it."""
    arguments = sys.argv[1:]
    try:
        code = _run_command(arguments)
        if arguments[:1] not in _OUTPUT_OF_PROGRAMS:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        if arguments[:1] in _OUTPUT_OF_PROGRAMS or not is_output_closed():
            raise
        # Like other commands, which SIGPIPE ends silently. Python still flushes the remaining
        # output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_EXIT_CODE


def _run_command(arguments: list[str]) -> int:
    try:
        return _dispatch(arguments)
    except HelpShown:
        return 0
    except CommandError as error:
        if asks_for_json(arguments):
            print(error_record(error.code, str(error)))
        name = f"penstock {error.command}" if error.command else "penstock"
        print(f"{name}: {error}", file=sys.stderr)
        if error.command is not None:
            print(f"`{name} --help` tells how it is called.", file=sys.stderr)
        return USAGE_EXIT_CODE


def _dispatch(arguments: list[str]) -> int:
    match arguments:
        case []:
            raise CommandError(f"missing command; available commands: {', '.join(COMMANDS)}")
        case ["--help" | "-h", *_]:
            print(_help(), end="")
        case ["--version", *_]:
            print(f"penstock {__version__}")
        case ["--cmake-dir"]:
            print(cmake_dir())
        case [name, *rest] if name in COMMANDS:
            code: int = _home(name).run_command(name, rest)
            return code
        case [option, *_] if option.startswith("-"):
            meant = did_you_mean(option, ["--version", "--cmake-dir", "--help"])
            raise CommandError(f"there is no option {option}{meant}")
        case [name, *_] if name.endswith(".py"):
            raise CommandError(f"there is no command {name}; did you mean penstock run {name}?")
        case [name, *_]:
            meant = did_you_mean(name, COMMANDS) or f"; available commands: {', '.join(COMMANDS)}"
            raise CommandError(f"there is no command {name}{meant}")
    return 0


def _home(command: str) -> ModuleType:
    """Import the module of a command. Raises CommandError if it is in a package that is not
    installed."""
    home = COMMANDS[command].home
    try:
        return import_module(home if "." in home else f"{__package__}.{home}")
    except ModuleNotFoundError as error:
        if error.name != "penstock_simulator":
            raise
        raise CommandError(
            "penstock simulate needs the package penstock-simulator; install it with pip install "
            "'penstock[simulate]'",
            None,
        ) from error


def cmake_dir() -> Path:
    """Return the folder in which find_package(Penstock) finds the library for C++ programs.

    Raises CommandError for an installation without the library.
    """
    folder = Path(__file__).resolve().parent.parent / "lib" / "cmake" / "Penstock"
    if not (folder / "PenstockConfig.cmake").is_file():
        raise CommandError(
            f"{folder} has no PenstockConfig.cmake: penstock was installed without its C++ "
            "library; install it with pip install --no-build-isolation ."
        )
    return folder


def _help() -> str:
    def table(rows: dict[str, str]) -> str:
        return "".join(f"  {name:<13}{text}\n" for name, text in rows.items())

    programs, pools, clusters, machines = (
        table({name: command.summary for name, command in commands.items()})
        for commands in (PROGRAM_COMMANDS, POOL_COMMANDS, CLUSTER_COMMANDS, MACHINE_COMMANDS)
    )
    return f"""\
usage: penstock COMMAND [ARGUMENT ...]

penstock loads training data, and moves the operations of a model that precede its first trained
layer into the data workers.

commands for a program:
{programs}
commands for a pool of data workers, on one machine or several:
{pools}
command for planning a cluster:
{clusters}
commands for this installation:
{machines}
options:
{table(OPTIONS)}
`penstock COMMAND --help` describes one command. `python -m penstock` is the same as `penstock`.
"""
