# SPDX-License-Identifier: Apache-2.0
"""The program that stands at the end of a command line: a file, or a module after -m."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator

from penstock.cli.command_parser import CommandError, did_you_mean
from penstock.cli.program import ProgramError, run_file, run_module

PROGRAM_USAGE = """\
{command} [OPTION ...] PROGRAM.py [ARGUMENT ...]
{command} [OPTION ...] -m MODULE [ARGUMENT ...]"""


def start_of(program: list[str], command: str) -> Callable[..., None]:
    """The call that runs the program. It may be given what is to be called right before."""
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
def named_if_missing(program: list[str]) -> Iterator[None]:
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
