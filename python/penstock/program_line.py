# SPDX-License-Identifier: Apache-2.0
"""Find the line of the user's program that a message is about.

A warning with a line of penstock or torch does not help the user: the relevant line is the one
where the program called them.
"""

from __future__ import annotations

import os.path
import sys
import warnings
from types import FrameType

from penstock.errors import PoolWarning

_LIBRARIES = ("penstock", "torch")


def warn(message: str, category: type[Warning] = PoolWarning) -> None:
    """Warn with `message` at the line of the program that called penstock or torch."""
    depth, _ = _program_frame()
    warnings.warn(message, category, stacklevel=depth)


def program_line() -> str:
    """Return that line as `train.py:31`; "" if no program has called, as in a worker's thread."""
    _, frame = _program_frame()
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _program_frame() -> tuple[int, FrameType | None]:
    """Return the innermost frame outside the libraries, and its stack level for a call of
    ``warnings.warn`` in the caller."""
    frame: FrameType | None = sys._getframe(2)
    depth = 2
    while frame is not None and _is_library_code(frame):
        frame, depth = frame.f_back, depth + 1
    return depth, frame


def _is_library_code(frame: FrameType) -> bool:
    # The file of generated code, such as a dataclass's __init__, is "<string>".
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES
