# SPDX-License-Identifier: Apache-2.0
"""The warning about batches that a loader has to unpickle, with its threshold."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sample_datasets import as_is

import penstock
from penstock import DataLoader
from penstock.loader.pickle_watch import WINDOW_BATCHES, PickleWatch, find_pickled
from penstock.stream import batch_types
from penstock.worker import batch_pickle


class Heavy:
    """A class that takes a while to unpickle."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __setstate__(self, state: dict[str, Any]) -> None:
        time.sleep(0.003)
        self.__dict__.update(state)


class Light(Heavy):
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class Batches(torch.utils.data.Dataset[Any]):
    def __init__(self, kind: type[Heavy]) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 3 * WINDOW_BATCHES

    def __getitem__(self, index: int) -> Any:
        return {"rows": torch.full((3,), index), "parsed": [self.kind(torch.ones(2))]}


@pytest.fixture(autouse=True)
def no_registered_classes() -> Iterator[None]:
    yield
    batch_types._registered.clear()
    batch_types._found.clear()


def warnings_of(kind: type[Heavy]) -> list[str]:
    options: dict[str, Any] = {"batch_size": None, "num_workers": 1, "collate_fn": as_is}
    options["multiprocessing_context"] = "fork"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = DataLoader(Batches(kind), **options)
        for _ in range(2):
            assert len(list(loader)) == 3 * WINDOW_BATCHES
    return [str(one.message) for one in caught if "pickled" in str(one.message)]


def test_loader_warns_once_and_names_class_cost_and_remedy() -> None:
    (text,) = warnings_of(Heavy)
    assert text.startswith(
        f"batch['parsed'][0] is of the class {__name__}.Heavy, so batches are pickled: "
    )
    assert " kB and " in text and " ms a batch in the trainer, " in text
    assert text.endswith(
        "call penstock.register_batch_type(Heavy, flatten, unflatten) before the loader starts its "
        "workers to send it without pickle"
    )


def test_loader_does_not_warn_about_cheap_pickles() -> None:
    assert warnings_of(Light) == []


def test_registration_ends_the_warning() -> None:
    penstock.register_batch_type(
        Heavy, lambda heavy: ([heavy.rows], None), lambda children, _: Heavy(children[0])
    )
    assert warnings_of(Heavy) == []


class Clock:
    """Time that passes as a test wants it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Waiting:
    """Takes time of the clock to be made again."""

    clock = Clock()

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __setstate__(self, state: dict[str, float]) -> None:
        self.seconds = state["seconds"]
        self.clock.now += self.seconds


@pytest.mark.parametrize(
    ("unpickling_s", "others_s", "is_warned"),
    [(0.0011, 0.0, True), (0.0009, 0.0, False), (0.01, 0.18, True), (0.01, 0.2, False)],
)
def test_warning_needs_a_millisecond_and_a_twentieth_of_the_time(
    unpickling_s: float, others_s: float, is_warned: bool
) -> None:
    watch = PickleWatch(Waiting.clock)
    data, tensors = batch_pickle.dumps([Waiting(unpickling_s)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(WINDOW_BATCHES + 1):
            watch.loads(data, tensors)
            Waiting.clock.now += others_s
    assert [one.category for one in caught] == [UserWarning] * is_warned


same = [1]


@pytest.mark.parametrize(
    ("value", "where", "what"),
    [
        ({"a": (1, np.ones(2))}, "batch['a'][1]", "of the class numpy.ndarray"),
        ([same, same], "batch[1]", "the same list as an earlier part"),
        ({"a": 1 << 70}, "batch['a']", "an int of more than 64 bits"),
        ({"a": "\ud800"}, "batch['a']", "a str with surrogates"),
        ([torch.ones(2, requires_grad=True)], "batch[0]", "of the class torch.Tensor"),
        ({Light: 1}, "batch", "a dict with a key of the class type"),
        ([{"x": Light(torch.ones(1))}], "batch[0]['x']", f"of the class {__name__}.Light"),
    ],
)
def test_part_that_makes_a_batch_a_pickle_is_found(value: Any, where: str, what: str) -> None:
    found = find_pickled(value)
    assert found is not None and (found.where, found.what) == (where, what)


def test_no_part_is_found_in_batches_without_pickle() -> None:
    from test_batch_types import KNOWN
    from test_tensor_types import SPARSE

    for make in (*KNOWN.values(), *SPARSE.values()):
        assert find_pickled({"a": [make(), (), ()]}) is None
