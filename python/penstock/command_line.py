# SPDX-License-Identifier: Apache-2.0
"""The command penstock."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import penstock
from penstock.explained_program import explain_program
from penstock.pool_commands import COMMANDS, CommandError, run_command
from penstock.program import ProgramError, run_file, run_module
from penstock.travelling_code import name_code_paths

USAGE = """\
usage: penstock run [--code PATH ...] PROGRAM.py [ARGUMENT ...]
       penstock run -m MODULE [ARGUMENT ...]
       penstock explain [--format text|json|dot] [--cut auto|maximal|none]
                        PROGRAM.py [ARGUMENT ...] | -m MODULE [ARGUMENT ...]
       penstock keys DIR
       penstock controller --bind tcp://HOST:PORT [--keys DIR]
       penstock worker --controller tcp://HOST:PORT [--processes N] [--keys DIR]
                       [--bind tcp://HOST:PORT] [--advertise tcp://HOST:PORT]
       penstock status [--json] [--controller tcp://HOST:PORT] [--keys DIR]
       penstock drain WORKER [--controller tcp://HOST:PORT] [--keys DIR]
       penstock --version | --help
"""
HELP = f"""{USAGE}
penstock run runs a Python program as python does, with penstock's DataLoader in the place of
torch's. The program, its arguments and the frameworks that it uses stay as they are. --code names
a folder or file of modules that travel to a pool's workers beside the program's own (once for each;
it sets PENSTOCK_CODE_PATHS).

penstock explain runs a program in the same way until it first calls a model with a batch of a
DataLoader. Then it ends the program and prints what of that model could run in the workers, what
has to stay in the trainer, why, and what it costs: as a table, as JSON, or as a graph for
Graphviz's dot. --cut says what to plan: the cheapest cut (auto), everything that can move, or
nothing; without it, what the program's own penstock.offload asks for, else auto. Standard output is
the plan alone; what the program prints goes to standard error. The exit code is 0 when there is a
plan (also one that says why nothing moves), 1 when the program called no model with a batch, and
the program's own when it fails.

penstock keys, controller, worker, status and drain are the commands of a pool of data workers on
several machines, which a DataLoader(pool="tcp://HOST:PORT") gets its batches from. Each tells its
options with --help. PENSTOCK_POOL and PENSTOCK_KEYS stand for --controller and --keys.

`python -m penstock` is the same as `penstock`.
"""
EXPLAIN_OPTIONS: dict[str, tuple[str, ...]] = {
    "--format": ("text", "json", "dot"),
    "--cut": ("auto", "maximal", "none"),
}
# What Python and its tools end with when they are called wrongly.
USAGE_EXIT_CODE = 2


def main() -> int:
    """Does what ``sys.argv`` asks for, and returns the exit code; a program that ends by an
    exception, SystemExit included, ends this call by it.
    """
    arguments = sys.argv[1:]
    try:
        _take_code_paths(arguments)
        match arguments:
            case ["--help" | "-h", *_] | ["run" | "explain", "--help" | "-h", *_]:
                print(HELP, end="")
            case ["--version"]:
                print(f"penstock {penstock.__version__}")
            case ["run", "-m", module, *rest]:
                run_module(module, rest)
            case ["run", "-m"]:
                return _refuse("run -m wants the name of a module")
            case ["run", path, *rest] if not path.startswith("-"):
                run_file(path, rest)
            case ["run"]:
                return _refuse("run wants a program to run")
            case ["run", option, *_]:
                return _refuse(f"run has no option {option}; the program's own come after it")
            case ["explain", *rest]:
                return _explain(rest)
            case [command, *rest] if command in COMMANDS:
                return run_command(command, rest)
            case []:
                return _refuse("a command is missing")
            case [command, *_]:
                return _refuse(f"there is no command {command}")
    except CommandError as error:
        return _refuse(str(error))
    except ProgramError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    return 0


def _take_code_paths(arguments: list[str]) -> None:
    """Takes ``--code PATH`` of ``penstock run`` out of its arguments, and heeds it."""
    paths = []
    while arguments[:1] == ["run"] and arguments[1:2] == ["--code"]:
        paths += arguments[2:3]
        del arguments[1:3]
    for path in paths:
        if not os.path.exists(path):
            raise CommandError(
                f"--code names {path!r}, which is not there; a folder or a .py file is expected"
            )
    if paths:
        name_code_paths(paths)


def _explain(arguments: list[str]) -> int:
    """`penstock explain` with these arguments."""
    chosen: dict[str, Any] = {"--format": "text", "--cut": None}
    while arguments and arguments[0] != "-m" and arguments[0].startswith("-"):
        name, has_value, value = arguments.pop(0).partition("=")
        if name not in EXPLAIN_OPTIONS:
            return _refuse(f"explain has no option {name}; the program's own come after it")
        expected = EXPLAIN_OPTIONS[name]
        if not has_value:
            value = arguments.pop(0) if arguments else ""
        if value not in expected:
            return _refuse(f"{name} is {value!r}, but {', '.join(expected)} are what it can be")
        chosen[name] = value
    match arguments:
        case ["-m", module, *rest]:
            run = functools.partial(run_module, module, rest)
        case ["-m"]:
            return _refuse("explain -m wants the name of a module")
        case [path, *rest]:
            run = functools.partial(run_file, path, rest)
        case _:
            return _refuse("explain wants a program to run")
    return explain_program(run, chosen["--format"], chosen["--cut"])


def _refuse(reason: str) -> int:
    print(f"penstock: {reason}\n{USAGE}", end="", file=sys.stderr)
    return USAGE_EXIT_CODE
