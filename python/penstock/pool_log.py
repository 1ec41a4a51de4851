# SPDX-License-Identifier: Apache-2.0
"""The lines that the processes of a pool leave for people."""

from __future__ import annotations

import sys
from typing import TextIO


def say(text: str) -> None:
    """That something goes as it should, on standard output."""
    _write(sys.stdout, text)


def tell(text: str) -> None:
    """What somebody should know, on standard error."""
    _write(sys.stderr, text)


def _write(stream: TextIO, text: str) -> None:
    """In one piece, since several processes say things in one place: where Python does not buffer,
    ``print`` writes the end of a line by itself."""
    stream.write(f"penstock worker: {text}\n")
    stream.flush()
