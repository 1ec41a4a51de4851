# SPDX-License-Identifier: Apache-2.0
"""How a penstock command parses its arguments, and its message when one is wrong or it fails.

argparse prints the whole usage for a typo. Here the caller prints two lines: the error, with the
name that was probably meant, and a pointer to the help.
"""

from __future__ import annotations

import argparse
import json
import re
import select
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

from penstock.errors import PenstockError, code_of
from penstock.tuning.byte_sizes import parse_bytes

_FIRST_COLUMN = 28  # column of the options' texts
_WIDTH = 100
FAILED_EXIT_CODE = 1
ERROR_SCHEMA = "penstock.error/1"


class CommandError(Exception):
    """A command was called wrongly; the message is for the user. ``command`` is the command whose
    help has more: "" is penstock itself, and None is no command."""

    def __init__(self, message: str, command: str | None = "", code: str = "usage") -> None:
        super().__init__(message)
        self.command = command
        self.code = code


class HelpShown(Exception):
    """The help was printed, and the command is done."""


class CommandParser(argparse.ArgumentParser):
    """The parser of one command. It raises CommandError and HelpShown instead of ending the
    process."""

    def __init__(self, command: str, usage: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=f"penstock {command}",
            usage="\n       ".join(f"penstock {line}" for line in usage.splitlines()),
            description=description,
            epilog=epilog,
            formatter_class=_HelpFormatter,
            add_help=False,
            allow_abbrev=False,
        )
        self.command = command
        self.add_argument("-h", "--help", action=_ShowHelp, help="print this help")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        # argparse would first report a missing argument, which may be the one that was mistyped.
        for argument in arguments:
            name = argument.partition("=")[0]
            if name == "--":
                break
            if re.match("-[^0-9]", name) and name not in self._option_string_actions:
                raise self._no_option(name)
        found, rest = self.parse_known_args(arguments)
        if rest:
            raise CommandError(f"unexpected argument {rest[0]!r}", self.command)
        return found

    def parse_before_program(
        self, arguments: Sequence[str]
    ) -> tuple[argparse.Namespace, list[str]]:
        """Return the arguments before a program, and the rest: ``-m`` or a path, and everything
        after it."""
        end = 0
        while end < len(arguments) and _is_option(arguments[end]):
            name, has_value, _ = arguments[end].partition("=")
            action = self._option_string_actions.get(name)
            if action is None:
                raise self._no_option(name, "; options of the program follow its name")
            end += 1 if has_value or action.nargs == 0 else 2
        return self.parse(arguments[:end]), list(arguments[end:])

    def _no_option(self, name: str, hint: str = "") -> CommandError:
        meant = did_you_mean(name, self._option_string_actions)
        return CommandError(f"there is no option {name}{meant or hint}", self.command)

    def error(self, message: str) -> NoReturn:
        """Report argparse's error, with the name of the argument first."""
        if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
            raise CommandError(f"{self._with_value(missing[1])} is missing", self.command)
        name, text = "", message
        if found := re.fullmatch(r"argument ([^:]*): (.*)", message, re.DOTALL):
            name, text = found[1].rpartition("/")[2], found[2]
        if text.startswith("expected one argument"):
            raise CommandError(f"{self._with_value(name)} requires a value", self.command)
        raise CommandError(f"{name} {text}".strip(), self.command)

    def _with_value(self, names: str) -> str:
        """Return the first of an argument's names, in the form in which it is written."""
        name = names.partition(", ")[0]
        action = self._option_string_actions.get(name)
        return name if action is None or action.nargs == 0 else f"{name} {action.metavar}"


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_FIRST_COLUMN, width=_WIDTH)


class _ShowHelp(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.print_help()
        raise HelpShown


def _is_option(argument: str) -> bool:
    return argument.startswith("-") and argument not in ("-", "-m")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name; "" if no known name is similar."""
    from difflib import get_close_matches  # only needed after a typo

    found = get_close_matches(name, list(names), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def run_subcommand(
    commands: Mapping[str, Callable[[Sequence[str]], int]], command: str, arguments: Sequence[str]
) -> int:
    """Run one of ``commands``, and print its error on standard error; with ``--json`` also on
    standard output. Raises BrokenPipeError if standard output has no reader any more."""
    try:
        return commands[command](arguments)
    except (CommandError, HelpShown):
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError) and is_output_closed():
            raise
        if asks_for_json(arguments):
            print(error_record(code_of(error), str(error)))
        if not isinstance(error, (PenstockError, ValueError, OSError)):
            raise
        print(f"penstock {command}: {error}", file=sys.stderr)
        return FAILED_EXIT_CODE


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Return whether ``--json`` or ``--format json`` is among the arguments before a program."""
    before = ""
    for argument in arguments:
        if argument == "-m" or argument.endswith(".py"):
            return False
        if argument in ("--json", "--format=json") or (before, argument) == ("--format", "json"):
            return True
        before = argument
    return False


def error_record(code: str, message: str) -> str:
    """Return the JSON text that a command with ``--json`` prints if it fails."""
    return json.dumps({"schema": ERROR_SCHEMA, "error": {"code": code, "message": message}})


def is_output_closed() -> bool:
    """Return whether standard output is a pipe closed by its reader, as `head` does."""
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # closed, or not a file
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """Return an argparse type: one of the names."""

    def choose(text: str) -> str:
        if text in names:
            return text
        meant = did_you_mean(text, names)
        raise argparse.ArgumentTypeError(f"must be {_listed(names)}, got {text!r}{meant}")

    return choose


def integer(least: int, most: int) -> Callable[[str], int]:
    """Return an argparse type: a whole number from ``least`` to ``most``."""

    def convert(text: str) -> int:
        if re.fullmatch(r"[+-]?\d{1,18}", text) and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"must be an integer from {least} to {most}, got {text!r}")

    return convert


def seconds(least: float) -> Callable[[str], float]:
    """Return an argparse type: a finite number of seconds."""

    def convert(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if least <= number < 1e6:
            return number
        raise argparse.ArgumentTypeError(f"must be a number of seconds >= {least:g}, got {text!r}")

    return convert


def byte_count(text: str) -> int:
    """Parse a number of bytes, as an argparse type: ``1048576``, ``200GB`` or ``64GiB``."""
    if (count := parse_bytes(text)) is not None:
        return count
    raise argparse.ArgumentTypeError(
        f"must be a number of bytes, such as 200GB, 64GiB or 1048576, got {text!r}"
    )


def amount(text: str) -> float:
    """Parse an amount of money, as an argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if 0 <= value < 1e9:
        return value
    raise argparse.ArgumentTypeError(f"must be an amount >= 0, got {text!r}")


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
