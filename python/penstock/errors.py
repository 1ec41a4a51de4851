# SPDX-License-Identifier: Apache-2.0
"""The exceptions that are penstock's own.

Where torch's DataLoader raises, penstock raises torch's type instead.
"""

from __future__ import annotations

import contextlib


class PenstockError(Exception):
    """Something failed between the trainer and its workers."""


class TimeoutError(PenstockError):  # noqa: A001 - the child of PenstockError, reached as penstock.errors.TimeoutError
    """A peer did not answer before its deadline."""


class ClosedError(PenstockError):
    """The peer is gone, or the loader was closed by ``close()``."""


class SharedMemoryError(PenstockError):
    """The system has no room for an arena, a mapping or a descriptor."""


class UnsupportedError(PenstockError):
    """This build of penstock, or this machine, cannot carry out the request."""


class MissingTorchNameError(UnsupportedError, ImportError):
    """This torch lacks private names that a part of penstock uses.

    An ImportError, as it is raised when that part is imported. ``names`` are the missing ones, as
    dotted paths from torch's root; ``torch_version`` is the torch that lacks them.
    """

    def __init__(
        self,
        module: str,
        names: list[str],
        torch_version: str,
        tested: tuple[str, ...],
        needed_by: str,
        without: str,
    ) -> None:
        self.names = names
        self.torch_version = torch_version
        super().__init__(
            f"torch {torch_version} lacks {', '.join(names)}, which {needed_by} needs "
            f"(penstock.compat.{module}); penstock was tested with torch {' and '.join(tested)}. "
            f"{without} Install one of these versions of torch, or a newer penstock"
        )


class WorkerError(PenstockError, RuntimeError):
    """A worker of a pool raised an exception of a type that the trainer does not make.

    Its text begins with the name of that type, and has the worker's traceback.
    """


class UnsentBatchError(WorkerError):
    """A worker of a pool made a batch with a part of a type that it does not send.

    ``refusal`` is the worker's word for that part.
    """

    refusal = ""


class RankError(PenstockError):
    """The ranks of a job do not read one order, or one of them does not come."""


class FallbackError(PenstockError):
    """Torch's iterator would have been used, and PENSTOCK_FALLBACK=error forbids it."""


class StateUnsupportedError(UnsupportedError, AttributeError):
    """The loader cannot say where it is in its stream.

    An AttributeError, so that it has no ``state_dict`` for those who look: accelerate and Lightning
    call it wherever they find one.
    """


class PoolWarning(UserWarning):
    """Something about a pool that the user should know, though training goes on."""


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an exception of the user's, where Python has notes (from 3.11 on) and the
    exception's class lets itself be written to. Raises nothing in the exception's place.
    """
    if hasattr(error, "add_note"):
        with contextlib.suppress(Exception):
            error.add_note(note)
