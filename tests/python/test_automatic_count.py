# SPDX-License-Identifier: Apache-2.0
"""num_workers="auto" as an attribute: programs see a number, copy it and assign another."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import warnings
from typing import Any

import pytest
import torch
from scheduled_workers import Augmented, Scheduled, Shard, automatic, stream
from stream_oracle import describe, error_of
from torch.utils.data import get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from penstock import DataLoader
from penstock.tuning.process_resources import usable_cpus
from penstock.tuning.worker_tuner import AutomaticCount


def test_auto_num_workers_is_an_int_to_programs() -> None:
    loader = DataLoader(Augmented(), num_workers="auto", seeding="batch")
    assert isinstance(loader.num_workers, int) and loader.num_workers >= 1
    assert f"{loader.num_workers} {json.dumps(loader.num_workers)}" == "{0} {0}".format(
        int(loader.num_workers)
    )
    assert (loader.prefetch_factor, loader.worker_choice) == (2, None)

    class Asking(Augmented):
        def __getitem__(self, index: int) -> Any:
            info = get_worker_info()
            assert info is not None
            return type(info.num_workers) is int

    asking = DataLoader(Asking(4), num_workers="auto", seeding="batch", collate_fn=all)
    assert list(asking) == [True] * 4


def test_assigning_num_workers_disables_automatic_tuning() -> None:
    loader: Any = automatic(Augmented(), [1, 2, 3], batch_size=2)
    loader.num_workers = 2
    counts: list[int] = []
    stream(loader, counts=counts)
    assert set(counts) == {2}


def public_attributes(loader: Any) -> dict[str, Any]:
    """The arguments from which Lightning and ignite rebuild a loader."""
    names = inspect.signature(type(loader).__init__).parameters
    attributes = {name: value for name, value in vars(loader).items() if not name.startswith("_")}
    assert set(attributes) <= set(names)
    for name in ("batch_size", "sampler", "drop_last", "batch_sampler"):
        del attributes[name]
    return attributes


def test_loader_rebuilt_from_attributes_stays_automatic() -> None:
    loader: Any = automatic(Augmented(), [], prefetch_factor=3)
    loader.num_workers = AutomaticCount(50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again: Any = DataLoader(batch_size=2, shuffle=True, **public_attributes(loader))
    assert type(again.num_workers) is AutomaticCount
    assert 1 <= again.num_workers <= usable_cpus()
    again._run.tuner = Scheduled([2, 1, 3])
    counts: list[int] = []
    stream(again, counts=counts)
    assert set(counts) >= {1, 2, 3}


def test_copied_count_without_batch_seeding_is_a_plain_int() -> None:
    """Accelerate copies torch's options and leaves out penstock's."""
    loader = DataLoader(Augmented(), num_workers="auto", seeding="batch")
    again = DataLoader(Augmented(), num_workers=loader.num_workers, prefetch_factor=2)
    assert type(again.num_workers) is int
    assert again.num_workers == loader.num_workers


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copied_loader_tunes_independently(copied: Any) -> None:
    loader: Any = automatic(Augmented(), [3], batch_size=2, shuffle=True)
    expected = stream(loader)
    assert int(loader.num_workers) == 3
    again = copied(loader)
    assert type(again.num_workers) is AutomaticCount
    assert int(again.num_workers) == 3
    assert again.worker_choice is None
    again._run.epoch_count = 0
    again._run.tuner = Scheduled([1, 2])
    assert stream(again) == expected
    assert int(again.num_workers) == 2


class StatefulRows(Augmented):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({}, ValueError, "num_workers='auto' requires seeding='batch', got seeding=None"),
        ({"seeding": "worker"}, ValueError, "got seeding='worker', with which"),
        ({"seeding": "x"}, ValueError, "or 'sample' (also the same for any batch size), got 'x'"),
        (
            {"dataset": Shard(), "seeding": "batch"},
            ValueError,
            "got shards=None, with which the shard of the Shard that a worker",
        ),
        ({"dataset": Shard(), "shards": 2}, ValueError, "shards=2 requires seeding='batch'"),
        (
            {"dataset": Shard(), "seeding": "batch", "shards": "2"},
            TypeError,
            "shards must be an int >= 1 or None, got '2'",
        ),
        (
            {"dataset": IterableWrapper([1]), "seeding": "batch"},
            ValueError,
            "for a datapipe, which torch",
        ),
        (
            {"dataset": StatefulRows(), "seeding": "batch"},
            ValueError,
            "does not support StatefulRows, which has a state_dict()",
        ),
        ({"seeding": "batch", "timeout": -1}, ValueError, "timeout option should be non-negative"),
        (
            {"seeding": "batch", "prefetch_factor": -1},
            ValueError,
            "prefetch_factor option should be non-negative",
        ),
        ({"seeding": "batch", "fetch_threads": 0}, ValueError, "fetch_threads must be >= 1, got 0"),
    ],
)
def test_auto_num_workers_is_rejected_with_incompatible_options(
    options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    error = error_of(
        lambda: DataLoader(**{"dataset": Augmented(), **options, "num_workers": "auto"})
    )
    assert type(error) is kind
    assert words in str(error)


@pytest.mark.parametrize("number", ["many", "AUTO", "", "2"])
def test_unknown_num_workers_string_is_rejected(number: Any) -> None:
    """The error was that '<' is not supported between instances of 'str' and 'int'. Its type is the
    same as torch's."""
    error = error_of(lambda: DataLoader(Augmented(), num_workers=number, seeding="batch"))
    torchs = error_of(lambda: torch.utils.data.DataLoader(Augmented(), num_workers=number))
    assert type(error) is type(torchs)
    assert str(error).startswith(f'num_workers must be an integer >= 0 or "auto", got {number!r}')


@pytest.mark.parametrize("number", [b"auto", None, [2]])
def test_num_workers_of_wrong_type_raises_torch_error(number: Any) -> None:
    error = error_of(lambda: DataLoader(Augmented(), num_workers=number, seeding="batch"))
    torchs = error_of(lambda: torch.utils.data.DataLoader(Augmented(), num_workers=number))
    assert describe(error) == describe(torchs)


def test_iter_checks_attributes_assigned_after_construction() -> None:
    loader: Any = DataLoader(Augmented(), num_workers="auto", seeding="batch")
    loader.seeding = None
    assert "pass seeding='batch', or a number of workers" in str(error_of(lambda: iter(loader)))
    loader = DataLoader(Augmented(), seeding="batch")
    loader.num_workers = "auto"
    error = error_of(lambda: iter(loader))
    assert type(error) is ValueError
    assert "must be an int when assigned after construction, got 'auto'" in str(error)
