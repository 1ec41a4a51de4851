# SPDX-License-Identifier: Apache-2.0
"""Parses commands of penstock like penstock, without running them: for recipes that contain
commands."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

import pytest

from penstock.cli import command_line
from penstock.cli.command_parser import CommandParser


class Parsed(Exception):
    """The arguments were parsed, and the command was not run."""

    def __init__(self, options: Namespace) -> None:
        super().__init__()
        self.options = options


Parse = Callable[[Sequence[str]], Namespace]


def parsing(monkeypatch: pytest.MonkeyPatch) -> Parse:
    """Return a parser for a command's arguments that behaves like the command. Wrong ones fail the
    test."""
    read = CommandParser.parse

    def read_and_stop(parser: CommandParser, arguments: Sequence[str]) -> Namespace:
        raise Parsed(read(parser, arguments))

    monkeypatch.setattr(CommandParser, "parse", read_and_stop)
    for name in ("PENSTOCK_POOL", "PENSTOCK_KEYS"):
        monkeypatch.delenv(name, raising=False)

    def parse_arguments(arguments: Sequence[str]) -> Namespace:
        monkeypatch.setattr(sys, "argv", ["penstock", *arguments])
        with pytest.raises(Parsed) as parsed:
            code = command_line.main()
            raise AssertionError(f"penstock {shlex.join(arguments)} is refused: {code}")
        return parsed.value.options

    return parse_arguments
