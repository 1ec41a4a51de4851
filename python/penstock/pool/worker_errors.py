# SPDX-License-Identifier: Apache-2.0
"""Errors of pool workers, which are sent as text: the name of a type, a place, and a traceback.

The worker describes the exception, and the trainer re-creates it from the description: the
exception that torch's DataLoader would raise, if its type is built into Python or torch. No module
is imported and no object unpickled for it.
"""

from __future__ import annotations

import builtins
import errno
import os
import socket
import sys
import traceback

import torch

from penstock.compat.iterators import ExceptionWrapper
from penstock.errors import (
    PenstockError,
    SharedMemoryError,
    UnsentBatchError,
    UnsupportedError,
    WorkerError,
)
from penstock.worker.map_fetchers import format_sample, name_sample

TEXT_BYTES_MAX = 64 * 1024
# The name of the error type with which a worker refuses to send a batch.
UNSENT_BATCH = f"{UnsentBatchError.__module__}.{UnsentBatchError.__qualname__}"

_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_CAUSES_MAX = 8  # examined per error

# If a trainer's iterator raised one of these, the epoch would end silently.
_ENDS_OF_ITERATION = (StopIteration, StopAsyncIteration)


def describe_error(error: BaseException) -> tuple[str, str]:
    """Return the name of the error's type, and a text: the place where it was raised, a zero
    character, and its traceback in the format of torch's workers.

    The name has no module if the type is built into Python. A traceback above the size limit is cut
    at the start, since the message is at the end.
    """
    cls = type(error)
    name = cls.__qualname__
    if cls.__module__ != "builtins":
        name = f"{cls.__module__}.{name}"
    wrapper = ExceptionWrapper((cls, error, error.__traceback__))
    place = f"{place_of_process()}\0"
    text = name_sample(wrapper.exc_msg, format_sample(error))
    return name, place + _end_of(text, TEXT_BYTES_MAX - len(os.fsencode(place)))


def name_sender(error: BaseException, worker: str) -> BaseException:
    """Return the error of a batch that the trainer cannot rebuild, with the worker that sent it.

    Args:
        error (BaseException): What rebuilding the batch has raised. Only an
            :class:`~penstock.errors.UnsupportedError` gets the name: its text is ours.
        worker (str): The name of the worker in messages.
    """
    if not isinstance(error, UnsupportedError):
        return error
    named = UnsupportedError(f"{error}; the batch came from penstock worker {worker}")
    named.__cause__ = error.__cause__
    return named


def is_shortage(error: BaseException) -> bool:
    """Return whether the system was out of memory or descriptors, according to ``error`` or one of
    its causes."""
    found: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if isinstance(found, (MemoryError, SharedMemoryError)):
            return True
        if found is None or isinstance(found, OSError):
            return found is not None and found.errno in _SHORTAGES
        found = found.__cause__
    return False


def end_forked_child(worker_pid: int, error: BaseException) -> None:
    """End this process as Python would after ``error`` if it is a child forked by the user's code:
    it is not a worker and must not answer for one. Do nothing in the worker itself."""
    if os.getpid() == worker_pid:
        return
    status = 1
    try:
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
        elif error.code is None or isinstance(error.code, int):
            status = error.code or 0
        else:
            print(error.code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status & 0xFF)


def place_of_process() -> str:
    """Describe this process for people at another machine, for example if a file is missing."""
    try:
        folder = os.getcwd()
    except OSError:
        folder = "which is gone"
    host = socket.gethostname()
    place = f"{host}, process {os.getpid()}, working directory {folder}"
    return place.encode("utf-8", "backslashreplace").decode()


def make_error(type_name: str, text: str, where: str) -> Exception:
    """Return the exception to raise in the trainer for a worker's :func:`describe_error`.

    ``where`` is in torch's format, such as ``in DataLoader worker process 0``. "" is for an error
    in the trainer itself, which has no traceback to show.
    """
    cls = _known_type(type_name)
    if not where:
        return (cls or PenstockError)(text)
    place, has_place, traceback = text.partition("\0")
    if has_place:
        where, text = f"{where} ({place})", traceback
    if cls is not None:
        error = _as_torch_raises(cls, text, where)
        if text in str(error):
            return error
        # Types with more parameters than a message may misinterpret it.
    message = f"{type_name} {where}.\nOriginal {text}"
    if type_name != UNSENT_BATCH:
        return WorkerError(message)
    unsent = UnsentBatchError(message)
    unsent.refusal = text.rstrip().rpartition("\n")[2].partition(": ")[2]
    return unsent


def _known_type(name: str) -> type[Exception] | None:
    """Return the exception of that name in Python's builtins or in torch; None for other names."""
    module, dot, own_name = name.rpartition(".")
    if dot and module != "torch":
        return None
    found = vars(torch if dot else builtins).get(own_name)
    if not isinstance(found, type) or not issubclass(found, Exception):
        return None  # SystemExit, KeyboardInterrupt and GeneratorExit among them
    return None if issubclass(found, _ENDS_OF_ITERATION) else found


def _as_torch_raises(cls: type[Exception], text: str, where: str) -> Exception:
    wrapper = ExceptionWrapper((cls, None, None), where=where)
    wrapper.exc_msg = text
    try:
        wrapper.reraise()
    except Exception as error:
        error.__context__ = None
        return error.with_traceback(None)
    raise AssertionError("reraise() returned")


def _end_of(text: str, bytes_max: int) -> str:
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= bytes_max:
        return data.decode()
    note = f"[the first bytes of {len(data)} are left out]\n"
    return note + data[len(note) - bytes_max :].decode("utf-8", "ignore")
