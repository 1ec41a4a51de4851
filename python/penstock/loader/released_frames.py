# SPDX-License-Identifier: Apache-2.0
"""Lets an iterator go that has raised an error, while the program keeps the error.

A traceback keeps the frames that it went through, and their variables: an iterator that raised
would live as long as its error, in a list of errors or in ``sys.last_traceback``, and would keep
its resources in other processes.
"""

from __future__ import annotations

from types import TracebackType

_ITERATORS_OWN = ("penstock.", "torch.utils.data.")


def release_frames(error: BaseException) -> None:
    """Clears the variables of the frames of penstock and of torch's iterators in ``error``.

    To be called where the error has left those frames. The user's own frames (of a sampler, of the
    program) keep their variables for a debugger.
    """
    seen: set[int] = set()
    told: BaseException | None = error
    while told is not None and id(told) not in seen:
        seen.add(id(told))
        _clear(told.__traceback__)
        told = told.__context__


def _clear(traceback: TracebackType | None) -> None:
    while traceback is not None:
        frame = traceback.tb_frame
        traceback = traceback.tb_next
        if not str(frame.f_globals.get("__name__", "")).startswith(_ITERATORS_OWN):
            continue
        try:
            frame.clear()
        except RuntimeError:
            pass  # it still runs: the caller's
