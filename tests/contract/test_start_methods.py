# SPDX-License-Identifier: Apache-2.0
"""fork, spawn and forkserver: the same stream, and torch's errors for objects that cannot be
pickled."""

from __future__ import annotations

import multiprocessing
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from sample_datasets import Computed, Streamed, drawn, number, own_share
from stream_oracle import Scenario, assert_same_stream, record, whole_epochs, without_frames
from torch.utils.data import TensorDataset, default_collate

METHODS = ["fork", "spawn", "forkserver"]


def labelled(samples: list[Any]) -> Any:
    return {"samples": default_collate(samples), "count": len(samples)}


def shift(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.function = partial(shifted, worker)  # type: ignore[attr-defined]


def shifted(worker: int, index: int) -> tuple[int, torch.Tensor]:
    return (worker, number(index))


KINDS: dict[str, Scenario] = {
    "random draws": Scenario(
        "random draws",
        partial(Computed, 7, drawn),
        {"batch_size": 2, "shuffle": True, "num_workers": 1, "collate_fn": labelled},
    ),
    "persistent tensor dataset": Scenario(
        "persistent tensor dataset",
        lambda: TensorDataset(torch.arange(10.0).view(5, 2), torch.arange(5)),
        {"batch_size": 2, "shuffle": True, "num_workers": 2, "persistent_workers": True},
        whole_epochs(2),
    ),
    "worker_init_fn": Scenario(
        "worker_init_fn",
        partial(Computed, 6, number),
        {"batch_size": 2, "num_workers": 2, "worker_init_fn": shift},
    ),
    "iterable": Scenario(
        "iterable",
        partial(Streamed, partial(own_share, 9)),
        {"batch_size": 2, "num_workers": 2},
    ),
}


def under(method: str, scenario: Scenario) -> Scenario:
    options = {**scenario.make_options(None), "multiprocessing_context": method}
    return Scenario(f"{scenario.name}, {method}", scenario.dataset, options, scenario.drive)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("spawn", "random draws"),
        ("spawn", "persistent tensor dataset"),
        ("forkserver", "iterable"),
        ("forkserver", "worker_init_fn"),
    ],
)
def test_stream_of_spawned_workers_matches_forked_ones(
    loader_class: type, method: str, kind: str
) -> None:
    fresh = record(loader_class, under(method, KINDS[kind]))
    forked = record(torch.utils.data.DataLoader, under("fork", KINDS[kind]))
    assert fresh == forked


@pytest.mark.parametrize("method", METHODS)
def test_context_object_is_equivalent_to_its_name(loader_class: type, method: str) -> None:
    context = multiprocessing.get_context(method)
    loader = loader_class([1, 2], num_workers=1, multiprocessing_context=context)
    assert loader.multiprocessing_context is context
    named = loader_class([1, 2], num_workers=1, multiprocessing_context=method)
    assert named.multiprocessing_context.get_start_method() == method


def test_fork_accepts_unpicklable_objects(loader_class: type) -> None:
    secret = object()

    class Local(Computed):
        def __getitem__(self, index: int) -> Any:
            return (index, self.function(index))

    dataset = Local(3, lambda index: secret is not None)
    assert_same_stream(
        loader_class,
        Scenario(
            "closures",
            lambda: dataset,
            {
                "num_workers": 1,
                "multiprocessing_context": "fork",
                "collate_fn": lambda samples: [secret is not None, *samples],
                "worker_init_fn": lambda worker: None,
            },
        ),
    )


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_unpicklable_dataset_warns_and_fails_as_with_torch(loader_class: type, method: str) -> None:
    loader = loader_class(
        Computed(3, lambda index: index), num_workers=2, multiprocessing_context=method
    )
    with pytest.warns(UserWarning, match="^Got pickle error when attempting to start a worker"):
        try:
            iter(loader)
        except (AttributeError, pickle.PicklingError) as error:
            without_frames(error)
            message = str(error)
    assert "<lambda>" in message


def test_loader_is_usable_after_a_failed_start(loader_class: type) -> None:
    loader = loader_class(
        Computed(3, lambda index: index), num_workers=1, multiprocessing_context="spawn"
    )
    with pytest.warns(UserWarning, match="Got pickle error"):
        try:
            iter(loader)
        except (AttributeError, pickle.PicklingError) as error:
            without_frames(error)
    loader.multiprocessing_context = "fork"
    assert [int(batch) for batch in loader] == [0, 1, 2]
