# SPDX-License-Identifier: Apache-2.0
"""The exceptions that penstock defines.

Where torch's DataLoader raises, penstock raises torch's type instead.
"""

from __future__ import annotations

import contextlib


class PenstockError(Exception):
    """Base class of penstock's exceptions: a failure between the trainer and its workers."""


class TimeoutError(PenstockError):  # noqa: A001 - the child of PenstockError, reached as penstock.errors.TimeoutError
    """A peer did not answer within its deadline."""


class ClosedError(PenstockError):
    """The peer closed the connection or exited, or the loader was closed by ``close()``."""


class SharedMemoryError(PenstockError):
    """The system has no room for another arena, mapping or file descriptor."""


class UnsupportedError(PenstockError):
    """This build of penstock, or this machine, does not support the request."""


class MissingTorchNameError(UnsupportedError, ImportError):
    """The installed torch lacks private names that a part of penstock uses.

    An ImportError, because it is raised when that part is imported.

    Attributes:
        names (list[str]): Missing names, as dotted paths from torch's root.
        torch_version (str): Version of the torch that lacks them.
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
    """A pool worker raised an exception of a type that the trainer does not re-create.

    The message starts with the name of that type and includes the worker's traceback.
    """


class UnsentBatchError(WorkerError):
    """A pool worker made a batch with a part of a type that it does not send.

    Attributes:
        refusal (str): Reason given by the worker.
    """

    refusal = ""


class RankError(PenstockError):
    """The ranks of a job do not read the same order, or a rank is missing."""


class FallbackError(PenstockError):
    """Torch's iterator would have been used, and ``PENSTOCK_FALLBACK=error`` forbids that."""


class StateUnsupportedError(UnsupportedError, AttributeError):
    """The loader cannot return its position in the stream.

    An AttributeError, so that ``hasattr(loader, "state_dict")`` is False: accelerate and Lightning
    call the method if it exists.
    """


class PoolWarning(UserWarning):
    """A condition of a pool that the user should know about; training continues."""


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an exception of the user's, where Python has notes (from 3.11 on) and the
    exception's class lets itself be written to. Raises nothing in the exception's place.
    """
    if hasattr(error, "add_note"):
        with contextlib.suppress(Exception):
            error.add_note(note)
