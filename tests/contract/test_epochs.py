# SPDX-License-Identifier: Apache-2.0
"""Several passes: persistent workers, half-read epochs, live iterators, changed attributes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from sample_datasets import Computed, Streamed, as_is, drawn, own_share, typed_index, where
from stream_oracle import Recorder, Scenario, assert_same_stream, whole_epochs
from torch.utils.data import BatchSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

DRAWS = partial(Computed, 12, drawn)
PLACES = partial(Computed, 12, where)


def restarted(*counts: int) -> Callable[[Any, Recorder], None]:
    """Reads that many batches of each epoch, then starts again; 0 means that none is read."""

    def drive(loader: Any, recorder: Recorder) -> None:
        for count in counts:
            iterator = iter(loader)
            recorder.note("iterator")
            for _ in range(count):
                recorder.draw(iterator)
        recorder.draw_all(iter(loader))

    return drive


def two_at_once(loader: Any, recorder: Recorder) -> None:
    first, second = iter(loader), iter(loader)
    recorder.note("two iterators", first is second)
    recorder.draw(first)
    recorder.draw(second)
    recorder.draw(second)
    recorder.draw_all(first)
    recorder.draw_all(second)


def old_after_new(loader: Any, recorder: Recorder) -> None:
    """The older iterator is dropped in the middle, while the newer one continues."""
    first = iter(loader)
    recorder.draw(first)
    second = iter(loader)
    recorder.draw(second)
    del first
    recorder.draw_all(second)


def past_the_end(loader: Any, recorder: Recorder) -> None:
    iterator = iter(loader)
    recorder.draw_all(iterator)
    recorder.draw(iterator)
    recorder.draw(iterator)


DRIVES: dict[str, Callable[[Any, Recorder], None]] = {
    "three whole epochs": whole_epochs(3),
    "one batch, then anew": restarted(1),
    "half, nothing, three, then anew": restarted(2, 0, 3),
    "next() after the end": past_the_end,
}

EPOCHS = (
    [
        Scenario(
            f"{name}, {workers} workers, persistent {persistent}, prefetch {prefetch}",
            DRAWS,
            {
                "batch_size": 2,
                "shuffle": True,
                "num_workers": workers,
                "persistent_workers": persistent,
                "prefetch_factor": prefetch,
            },
            drive,
        )
        for workers, persistent, prefetch in (
            (0, False, None),
            (2, False, 2),
            (2, True, 2),
            (3, True, 5),
        )
        for name, drive in DRIVES.items()
        if prefetch != 5 or "half" in name
    ]
    + [
        Scenario(
            f"iterable: {name}, {workers} workers, persistent {persistent}",
            partial(Streamed, partial(own_share, 13)),
            {"batch_size": 2, "num_workers": workers, "persistent_workers": persistent},
            drive,
        )
        for workers, persistent in ((0, False), (1, False), (2, True))
        for name, drive in DRIVES.items()
        if workers != 1 or "half" in name
    ]
    + [
        Scenario(
            f"{drive.__name__}, {workers} workers",
            DRAWS,
            {"batch_size": 3, "shuffle": True, "num_workers": workers},
            drive,
        )
        for workers in (0, 2)
        for drive in (two_at_once, old_after_new)
    ]
)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("scenario", EPOCHS, ids=lambda scenario: scenario.name)
def test_epochs_match_torch(loader_class: type, scenario: Scenario) -> None:
    assert_same_stream(loader_class, scenario)


def flag(samples: list[Any]) -> tuple[str, Any]:
    return ("flagged", samples)


def greet(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.function = typed_index  # type: ignore[union-attr]


CHANGES: dict[str, Callable[[Any], None]] = {
    "collate_fn": lambda loader: setattr(loader, "collate_fn", flag),
    "more workers": lambda loader: setattr(loader, "num_workers", 3),
    "fewer workers": lambda loader: setattr(loader, "num_workers", 1),
    "worker_init_fn": lambda loader: setattr(loader, "worker_init_fn", greet),
    "prefetch_factor": lambda loader: setattr(loader, "prefetch_factor", 4),
    "timeout": lambda loader: setattr(loader, "timeout", 30),
    "generator": lambda loader: setattr(loader, "generator", torch.Generator().manual_seed(1)),
    "batch size of the batch sampler": lambda loader: setattr(
        loader.batch_sampler, "batch_size", 5
    ),
    "drop_last of the batch sampler": lambda loader: setattr(
        loader.batch_sampler, "drop_last", True
    ),
    "the dataset's own attribute": lambda loader: setattr(loader.dataset, "function", typed_index),
}


def changed_between_epochs(change: Callable[[Any], None], loader: Any, recorder: Recorder) -> None:
    recorder.draw_all(iter(loader))
    change(loader)
    recorder.draw_all(iter(loader))


# Torch itself fails when a persistent loader's number of workers is changed: no contract.
CHANGED = [
    Scenario(
        f"{name}, persistent {persistent}",
        PLACES,
        lambda dataset, persistent=persistent: {
            "batch_sampler": BatchSampler(SequentialSampler(dataset), 4, drop_last=False),
            "num_workers": 2,
            "persistent_workers": persistent,
            "collate_fn": as_is,
        },
        partial(changed_between_epochs, change),
    )
    for name, change in CHANGES.items()
    for persistent in (False, True)
    if not (persistent and ("workers" in name or name in ("timeout", "prefetch_factor")))
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("scenario", CHANGED, ids=lambda scenario: scenario.name)
def test_attribute_change_between_epochs_acts_as_with_torch(
    loader_class: type, scenario: Scenario
) -> None:
    assert_same_stream(loader_class, scenario)


def test_changed_num_workers_takes_effect_at_the_next_iter(loader_class: type) -> None:
    def drive(loader: Any, recorder: Recorder) -> None:
        for workers, prefetch in ((0, None), (2, 2), (0, None)):
            loader.num_workers = workers
            loader.prefetch_factor = prefetch
            recorder.draw_all(iter(loader))

    assert_same_stream(loader_class, Scenario("to and fro", DRAWS, {"batch_size": 3}, drive))


def test_persistent_loader_reuses_its_iterator_and_workers(loader_class: type) -> None:
    loader = loader_class(
        Computed(6, where), num_workers=2, persistent_workers=True, collate_fn=as_is
    )
    first = iter(loader)
    pids = [worker.pid for worker in first._workers]
    list(first)
    assert iter(loader) is first
    assert [worker.pid for worker in first._workers] == pids
    assert all(worker.is_alive() for worker in first._workers)


def test_loader_makes_a_new_iterator_and_workers_each_time(loader_class: type) -> None:
    loader = loader_class(Computed(6, where), num_workers=1, collate_fn=as_is)
    first, second = iter(loader), iter(loader)
    assert first is not second
    assert first._workers[0].pid != second._workers[0].pid


def test_persistent_workers_do_not_see_later_dataset_changes(
    loader_class: type,
) -> None:
    loader = loader_class(Computed(2, where), num_workers=1, persistent_workers=True)
    list(loader)
    loader.dataset.function = typed_index
    assert [type(batch[0]) for batch in loader] == [torch.Tensor, torch.Tensor]


@pytest.mark.parametrize("workers", [0, 1])
def test_iterator_has_the_type_and_attributes_of_torch(loader_class: type, workers: int) -> None:
    iterator = iter(loader_class(Computed(5, float), batch_size=2, num_workers=workers))
    assert iter(iterator) is iterator
    assert isinstance(iterator, _BaseDataLoaderIter)
    assert isinstance(iterator, _MultiProcessingDataLoaderIter) is (workers > 0)
    assert len(iterator) == 3
    assert iterator._num_yielded == 0
    next(iterator)
    assert iterator._num_yielded == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_iterator_cannot_be_pickled(loader_class: type, workers: int) -> None:
    import pickle

    with pytest.raises(NotImplementedError, match="cannot be pickled"):
        pickle.dumps(iter(loader_class([1, 2], num_workers=workers)))


def test_samples_are_read_on_demand_without_workers(
    loader_class: type,
) -> None:
    read: list[int] = []

    def note(index: int) -> int:
        read.append(index)
        return index

    iterator = iter(loader_class(Computed(6, note), batch_size=2))
    assert read == []
    next(iterator)
    assert read == [0, 1]


@pytest.mark.parametrize(
    ("workers", "name"),
    [(0, "_SingleProcessDataLoaderIter"), (1, "_MultiProcessingDataLoaderIter")],
)
def test_profiler_records_next_under_the_torch_name(
    loader_class: type, workers: int, name: str
) -> None:
    """Tools that analyse data loading look for this text in traces."""
    iterator = iter(loader_class([1, 2], num_workers=workers))
    with torch.autograd.profiler.profile() as profile:
        next(iterator)
    names = {event.name for event in profile.function_events}
    assert f"enumerate(DataLoader)#{name}.__next__" in names
