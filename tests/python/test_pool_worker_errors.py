# SPDX-License-Identifier: Apache-2.0
"""The exception of a pool worker, reconstructed from its name and its text."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._utils import ExceptionWrapper

import penstock
from penstock.errors import PenstockError, WorkerError
from penstock.pool.worker_errors import (
    TEXT_BYTES_MAX,
    describe_error,
    make_error,
    place_of_process,
)

WORKER = "in DataLoader worker process 3"
WHERE = f"{WORKER} ({place_of_process()})"


class OwnError(Exception):
    pass


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def as_torch_raises(error: BaseException) -> Exception:
    try:
        ExceptionWrapper((type(error), error, error.__traceback__), where=WHERE).reraise()
    except Exception as again:
        return again
    raise AssertionError


@pytest.mark.parametrize(
    "error",
    [
        ValueError("5 is not a label"),
        KeyError("image"),
        IndexError(7),
        RuntimeError(),
        OSError(2, "No such file", "/data/a.jpg"),
        FileNotFoundError("gone"),
        ZeroDivisionError("line\nline"),
        AssertionError(),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),  # cannot be made of a message alone
        torch.OutOfMemoryError("no room"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_known_exception_types_are_raised_as_by_torch(error: Exception) -> None:
    caught = raised(error)
    made = make_error(*describe_error(caught), WORKER)
    expected = as_torch_raises(caught)
    assert type(made) is type(expected)
    assert str(made) == str(expected)
    assert repr(made) == repr(expected)
    assert made.__cause__ is None and made.__context__ is None


def test_missing_file_error_names_host_process_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user read that images/7.jpg is missing in penstock worker a129826fdf6b49b8."""
    monkeypatch.chdir(tmp_path)
    name, text = describe_error(raised(FileNotFoundError(2, "No such file", "images/7.jpg")))
    monkeypatch.undo()
    made = make_error(name, text, "in penstock worker a129826fdf6b49b8")
    assert type(made) is FileNotFoundError
    assert str(made).startswith(
        f"Caught FileNotFoundError in penstock worker a129826fdf6b49b8 ({socket.gethostname()}, "
        f"process {os.getpid()}, working directory {tmp_path}).\nOriginal Traceback"
    )


def test_trainer_error_names_no_worker() -> None:
    """The user read: Caught RuntimeError in penstock worker none."""
    made = make_error("RuntimeError", "3 workers in a row died", "")
    assert type(made) is RuntimeError
    assert str(made) == "3 workers in a row died"


def test_unknown_type_becomes_a_worker_error_with_its_name() -> None:
    name, text = describe_error(raised(OwnError("why")))
    assert name == f"{__name__}.OwnError"
    made = make_error(name, text, WORKER)
    assert type(made) is WorkerError is penstock.WorkerError
    assert isinstance(made, RuntimeError) and isinstance(made, PenstockError)
    assert str(made).startswith(f"{name} {WHERE}.\nOriginal Traceback (most recent call last)")
    assert str(made).rstrip().endswith("OwnError: why")


def test_trainer_error_has_its_message_alone() -> None:
    """`Caught RuntimeError in penstock worker none.\\nOriginal 3 workers died one after...`"""
    made = make_error("RuntimeError", "3 workers died", "")
    assert type(made) is RuntimeError
    assert str(made) == "3 workers died"


@pytest.mark.parametrize(
    "name",
    [
        "StopIteration",
        "StopAsyncIteration",
        "SystemExit",
        "KeyboardInterrupt",
        "GeneratorExit",
        "BaseException",
        "BaseExceptionGroup",
        "ExceptionGroup",  # takes no message alone, and would lose the text
        "print",
        "eval",
        "__import__",
        "torch",
        "torch.Tensor",
        "torch.nn.Module",
        "torch.load",
        "os.system",
        "builtins.ValueError",
        "torch.utils.data.Dataset",
        "",
        ".",
        "torch.",
        ".ValueError",
        "ValueError.mro",
        "\udc80",
    ],
)
def test_unsafe_or_unknown_names_become_worker_errors(name: str) -> None:
    made = make_error(name, "Traceback ...\nboom", WHERE)
    assert type(made) is WorkerError
    assert str(made).startswith(f"{name} {WHERE}.\nOriginal Traceback")


def test_no_module_is_imported_for_an_error_name() -> None:
    before = set(sys.modules)
    make_error("this.That", "text", WHERE)
    make_error("torch.this", "text", WHERE)
    assert set(sys.modules) == before


@pytest.mark.parametrize("end", [SystemExit(3), KeyboardInterrupt(), StopIteration(5)])
def test_exits_and_stop_iteration_become_worker_errors(end: BaseException) -> None:
    name, text = describe_error(raised(end))
    assert name == type(end).__name__
    assert type(make_error(name, text, WORKER)) is WorkerError


def test_long_traceback_keeps_its_end() -> None:
    name, text = describe_error(raised(ValueError("é" * TEXT_BYTES_MAX + "the end")))
    assert len(text.encode()) <= TEXT_BYTES_MAX
    _, _, traceback = text.partition("\0")
    assert traceback.startswith("[the first bytes of ") and traceback.endswith("the end\n")
    made = make_error(name, text, WORKER)
    assert type(made) is ValueError and "the end" in str(made)


def test_error_text_can_always_be_encoded() -> None:
    _, text = describe_error(raised(ValueError("\udc80 in a name")))
    assert "\\udc80 in a name" in text.encode().decode()


def test_error_whose_str_raises_is_described() -> None:
    class Silent(Exception):
        def __str__(self) -> Any:
            raise RuntimeError("no text")

    name, text = describe_error(raised(Silent()))
    assert name.endswith("<locals>.Silent")
    assert "Silent" in text
