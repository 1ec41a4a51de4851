# SPDX-License-Identifier: Apache-2.0
"""The command penstock."""

from __future__ import annotations

import sys

import penstock
from penstock.program import ProgramError, run_file, run_module

USAGE = """\
usage: penstock run PROGRAM.py [ARGUMENT ...]
       penstock run -m MODULE [ARGUMENT ...]
       penstock --version | --help
"""
HELP = f"""{USAGE}
penstock run runs a Python program as python does, with penstock's DataLoader in the place of
torch's. The program, its arguments and the frameworks that it uses stay as they are.
`python -m penstock` is the same as `penstock`.
"""
# What Python and its tools end with when they are called wrongly.
USAGE_EXIT_CODE = 2


def main() -> int:
    """Does what ``sys.argv`` asks for, and returns the exit code; a program that ends by an
    exception, SystemExit included, ends this call by it.
    """
    arguments = sys.argv[1:]
    try:
        match arguments:
            case ["--help" | "-h", *_] | ["run", "--help" | "-h", *_]:
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
            case []:
                return _refuse("a command is missing")
            case [command, *_]:
                return _refuse(f"there is no command {command}")
    except ProgramError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    return 0


def _refuse(reason: str) -> int:
    print(f"penstock: {reason}\n{USAGE}", end="", file=sys.stderr)
    return USAGE_EXIT_CODE
