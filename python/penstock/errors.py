# SPDX-License-Identifier: Apache-2.0
"""The exceptions that penstock defines, and the codes of errors.

Where torch's DataLoader raises, penstock raises torch's type instead. A code is a name of a kind of
error that stays the same in later versions, unlike messages: `penstock COMMAND --json` prints it,
and ``docs/reference/errors.md`` lists all of them.
"""

from __future__ import annotations

import contextlib


class PenstockError(Exception):
    """Base class of penstock's exceptions: a failure between the trainer and its workers.

    Attributes:
        code (str): Stable name of the kind of error, such as ``"worker-failed"``.
    """

    code = "failed"


class TimeoutError(PenstockError):  # noqa: A001 - the child of PenstockError, reached as penstock.errors.TimeoutError
    """A peer did not answer within its deadline."""

    code = "timeout"


class ClosedError(PenstockError):
    """The peer closed the connection or exited, or the loader was closed by ``close()``."""

    code = "closed"


class SharedMemoryError(PenstockError):
    """The system has no room for another arena, mapping or file descriptor."""

    code = "no-memory"


class UnsupportedError(PenstockError):
    """This build of penstock, or this machine, does not support the request."""

    code = "unsupported"


class MissingTorchNameError(UnsupportedError, ImportError):
    """The installed torch lacks private names that a part of penstock uses.

    An ImportError, because it is raised when that part is imported.

    Attributes:
        names (list[str]): Missing names, as dotted paths from torch's root.
        torch_version (str): Version of the torch that lacks them.
    """

    code = "torch-name-missing"

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

    code = "worker-failed"


class UnsentBatchError(WorkerError):
    """A pool worker made a batch with a part of a type that it does not send.

    Attributes:
        refusal (str): Reason given by the worker.
    """

    code = "batch-not-sent"
    refusal = ""


class RankError(PenstockError):
    """The ranks of a job do not read the same order, or a rank is missing."""

    code = "ranks-disagree"


class FallbackError(PenstockError):
    """Torch's iterator would have been used, and ``PENSTOCK_FALLBACK=error`` forbids that."""

    code = "fallback-forbidden"


class StateUnsupportedError(UnsupportedError, AttributeError):
    """The loader cannot return its position in the stream.

    An AttributeError, so that ``hasattr(loader, "state_dict")`` is False: accelerate and Lightning
    call the method if it exists.
    """

    code = "state-unsupported"


class PoolWarning(UserWarning):
    """A condition of a pool that the user should know about; training continues.

    Attributes:
        code (str): ``"pool-warning"``.
    """

    code = "pool-warning"


# The codes of exceptions that are not penstock's.
_BUILTIN_CODES: dict[type[BaseException], str] = {
    ValueError: "invalid-argument",
    TypeError: "invalid-argument",
    OSError: "system-call-failed",
    ImportError: "import-failed",
    KeyboardInterrupt: "interrupted",
}


def code_of(error: BaseException) -> str:
    """Return the code of an exception or a warning that penstock raised.

    Args:
        error (BaseException): The exception.

    Returns:
        str: Its attribute ``code`` for the types of this module; a code by its type for builtin
        exceptions, such as ``"invalid-argument"`` for a ValueError; otherwise ``"failed"``.
    """
    if isinstance(error, (PenstockError, PoolWarning)):
        return error.code
    kinds = (code for kind, code in _BUILTIN_CODES.items() if isinstance(error, kind))
    return next(kinds, PenstockError.code)


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an exception of the user's, where Python has notes (from 3.11 on) and the
    exception's class lets itself be written to. Raises nothing in the exception's place.
    """
    if hasattr(error, "add_note"):
        with contextlib.suppress(Exception):
            error.add_note(note)
