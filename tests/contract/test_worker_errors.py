# SPDX-License-Identifier: Apache-2.0
"""Errors of the user's code: torch's type and text, in place of their batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from case_streams import assert_same_outcomes, one_by_one
from sample_datasets import Computed, Streamed, number, worker_id
from stream_oracle import Recorder, Scenario, assert_same_stream, next_error, whole_epochs


class WithMessage(Exception):
    """Has a class attribute `message`, so that torch makes it with that keyword."""

    message = "a default"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class TwoArguments(Exception):
    """Cannot be made from one text: torch raises a RuntimeError with its text."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


class Strict(Exception):
    """Rejects the text that torch would make it from."""

    def __init__(self, code: int) -> None:
        super().__init__(int(code))


class KeyChild(KeyError):
    """A child of KeyError, which torch does not treat as one."""


class NotAnException(BaseException):
    pass


class Silent(Exception):
    def __str__(self) -> str:
        return ""


ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("bad crop"),
    "without arguments": lambda: ValueError(),
    "KeyError": lambda: KeyError("label"),
    "KeyError of a number": lambda: KeyError(17),
    "a child of KeyError": lambda: KeyChild("label"),
    "IndexError": lambda: IndexError("list index out of range"),
    "OSError with errno": lambda: OSError(2, "No such file", "a.jpg"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "StopIteration": lambda: StopIteration(),
    "StopIteration with a value": lambda: StopIteration(3),
    "AssertionError": lambda: AssertionError("shape"),
    "several lines": lambda: RuntimeError("first\nsecond\n\nthird"),
    "text beyond ASCII": lambda: ValueError("größer als \U0001f600 \ud800"),
    "an error without text": lambda: Silent("never shown"),
    "an attribute `message`": lambda: WithMessage("damaged"),
    "two arguments": lambda: TwoArguments(3, "damaged"),
    "refuses a text": lambda: Strict(3),
    "OutOfMemoryError of torch": lambda: torch.OutOfMemoryError("no memory"),
    "MemoryError": lambda: MemoryError("no memory"),
    "RecursionError": lambda: RecursionError("too deep"),
    "NotImplementedError": lambda: NotImplementedError("later"),
    "a warning as an error": lambda: UserWarning("loud"),
    "a megabyte of text": lambda: ValueError("x" * 1_000_000),
}


def raises_at(bad: tuple[int, ...], name: str, index: int) -> Any:
    if index in bad:
        raise ERRORS[name]()
    return number(index)


def chained(index: int) -> Any:
    if index == 1:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error
    return number(index)


def with_note(index: int) -> Any:
    error = ValueError("noted")
    error.add_note("seen in shard 3")
    raise error


def raising(make: Callable[[], BaseException]) -> Any:
    raise make()


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_every_kind_are_raised_as_by_torch(loader_class: type, workers: int) -> None:
    cases = {
        name: partial(raising, make) for name, make in ERRORS.items() if "StopIter" not in name
    }
    assert_same_outcomes(loader_class, cases, one_by_one, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["ValueError", "StopIteration", "StopIteration with a value"])
def test_dataset_error_takes_the_place_of_its_batch(
    loader_class: type, name: str, workers: int
) -> None:
    assert_same_stream(
        loader_class,
        Scenario(
            name,
            partial(Computed, 8, partial(raises_at, (0, 5), name)),
            {"batch_size": 2, "num_workers": workers},
        ),
    )


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("bad", [(0,), (2, 3, 4), tuple(range(8))])
def test_iteration_continues_after_errors_of_any_worker(
    loader_class: type, bad: tuple[int, ...], workers: int
) -> None:
    assert_same_stream(
        loader_class,
        Scenario(
            "errors",
            partial(Computed, 8, partial(raises_at, bad, "ValueError")),
            {"num_workers": workers, "prefetch_factor": 1},
        ),
    )


@pytest.mark.parametrize(
    "make",
    [
        chained,
        pytest.param(
            with_note,
            marks=pytest.mark.skipif(
                sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on"
            ),
        ),
    ],
)
def test_causes_and_notes_are_in_the_error_text(
    loader_class: type, make: Callable[[int], Any]
) -> None:
    expected = ("KeyError: 'inner'", "direct cause") if make is chained else ("seen in shard 3",)
    loader = loader_class(Computed(4, make), batch_size=4, num_workers=1)
    error = next_error(iter(loader))
    assert type(error) is ValueError
    assert str(error).startswith("Caught ValueError in DataLoader worker process 0.\nOriginal Tra")
    for text in (*expected, "test_worker_errors.py"):
        assert text in str(error)


def test_dataset_error_is_raised_unchanged_without_workers(loader_class: type) -> None:
    error = TwoArguments(3, "damaged")

    def fail(index: int) -> Any:
        raise error

    assert next_error(iter(loader_class(Computed(4, fail)))) is error


def bad_collate(samples: list[Any]) -> Any:
    if 3.0 in [float(sample[0]) for sample in samples]:
        raise TypeError("these do not go together")
    return torch.stack(samples)


def fails_in_one_worker(bad: int, worker: int) -> None:
    if worker == bad:
        raise LookupError(f"worker {worker} found no shard")


def fails_always(*_: Any) -> Any:
    raise LookupError("no shard")


class BadIter(Streamed):
    def __iter__(self) -> Iterator[Any]:
        if worker_id() == 1:
            raise OSError("shard 1 is missing")
        return super().__iter__()


class RefusesBatches(Computed):
    def __init__(self, length: int) -> None:
        super().__init__(length, number)

    def __getitems__(self, indices: list[int]) -> Any:
        raise ValueError(f"cannot fetch {indices}")


class NoLength(Computed):
    def __init__(self) -> None:
        super().__init__(0, number)

    def __len__(self) -> int:
        raise TypeError("how long is a stream")


ELSEWHERE = [
    Scenario(
        f"in collate_fn, {workers} workers",
        partial(Computed, 8, number),
        {"batch_size": 2, "num_workers": workers, "collate_fn": bad_collate},
    )
    for workers in (0, 2)
] + [
    Scenario(
        "in worker_init_fn of each worker",
        partial(Computed, 8, number),
        {"batch_size": 2, "num_workers": 2, "worker_init_fn": fails_always},
    ),
    Scenario(
        "in worker_init_fn of the second worker",
        partial(Computed, 8, number),
        {"batch_size": 2, "num_workers": 2, "worker_init_fn": partial(fails_in_one_worker, 1)},
    ),
    Scenario(
        "in worker_init_fn of an iterable dataset's worker",
        partial(Streamed, partial(range, 6)),
        {"batch_size": 2, "num_workers": 2, "worker_init_fn": partial(fails_in_one_worker, 0)},
    ),
    Scenario(
        "in worker_init_fn, over two epochs",
        partial(Computed, 4, number),
        {
            "batch_size": 2,
            "num_workers": 2,
            "worker_init_fn": partial(fails_in_one_worker, 1),
        },
        whole_epochs(2),
    ),
    Scenario(
        "in iter() of one worker's dataset",
        partial(BadIter, partial(range, 4)),
        {"batch_size": 2, "num_workers": 2},
    ),
    Scenario(
        "in __getitems__",
        lambda: RefusesBatches(6),
        {"batch_size": 2, "num_workers": 1},
    ),
    Scenario(
        "in __len__ of a sampler's dataset",
        lambda: NoLength(),
        {"batch_size": 2, "num_workers": 1},
    ),
]


@pytest.mark.parametrize("scenario", ELSEWHERE, ids=lambda scenario: scenario.name)
def test_errors_in_other_callbacks_match_torch(loader_class: type, scenario: Scenario) -> None:
    assert_same_stream(loader_class, scenario)


def test_persistent_worker_error_does_not_reach_the_next_epoch(loader_class: type) -> None:
    assert_same_stream(
        loader_class,
        Scenario(
            "errors over epochs",
            partial(Computed, 8, partial(raises_at, (3,), "KeyError")),
            {"batch_size": 2, "num_workers": 2, "persistent_workers": True, "shuffle": True},
            whole_epochs(3),
        ),
    )


def test_epoch_can_be_restarted_after_an_error(loader_class: type) -> None:
    def drive(loader: Any, recorder: Recorder) -> None:
        iterator = iter(loader)
        recorder.draw(iterator)
        recorder.draw(iterator)
        recorder.draw_all(iter(loader))

    assert_same_stream(
        loader_class,
        Scenario(
            "left at an error",
            partial(Computed, 8, partial(raises_at, (2,), "ValueError")),
            {"batch_size": 2, "num_workers": 2, "persistent_workers": True},
            drive,
        ),
    )


def test_different_shapes_fail_with_the_text_of_torch(loader_class: type) -> None:
    loader = loader_class(Computed(4, torch.zeros), batch_size=2, num_workers=1)
    error = next_error(iter(loader))
    assert type(error) is RuntimeError
    assert str(error).startswith("Caught RuntimeError in DataLoader worker process 0.")
    assert "stack expects each tensor to be equal size" in str(error)


def test_error_containing_a_tensor_arrives(loader_class: type) -> None:
    def fail(index: int) -> Any:
        raise ValueError("with data", torch.ones(2))

    error = next_error(iter(loader_class(Computed(4, fail), num_workers=1)))
    assert type(error) is ValueError
    assert "('with data', tensor([1., 1.]))" in str(error)
