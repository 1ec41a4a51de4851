# SPDX-License-Identifier: Apache-2.0
"""``on_error="skip"``: the stream is torch's without the samples that raise, and they are listed.

The oracle is a loader over a dataset that marks these samples instead of raising, and whose
``collate_fn`` drops the marks: it makes the same calls and draws.
"""

from __future__ import annotations

import gc
import json
import logging
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from cut_models import CASES, images
from offload_training import fresh, train
from pool_datasets import CODE, Corrupt, CorruptBatches
from pool_processes import PoolProcesses
from resumed_streams import Backwards, seed_all, through_json
from stream_oracle import describe
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    default_collate,
    default_convert,
)
from torch.utils.data.datapipes.map import SequenceWrapper

import penstock
from penstock import DataLoader, PenstockError, Pool, Ranks, SkippedSample, WorkerError
from penstock.cut.offloading import offload
from penstock.loader.skipped_samples import logger
from penstock.worker.partial_batch import SampleFailure, SkipReport

COUNT = 24
BAD = (2, 8, 9, 10, 11, 17)  # in order and by 4, a whole batch among them
SKIP: dict[str, Any] = {"on_error": "skip"}
WORKERS = [0, pytest.param(2, marks=pytest.mark.slow)]
needs_notes = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="an exception carries notes from Python 3.11 on"
)


class Marked(Dataset[Any]):
    """Returns None where ``dataset`` raises."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except LookupError:
            return None


def without_marks(samples: list[Any]) -> Any:
    kept = [sample for sample in samples if sample is not None]
    return default_collate(kept) if kept else None


def unmarked(sample: Any) -> Any:
    return None if sample is None else default_convert(sample)


def expected(dataset: Any, loader_class: Any, epochs: int = 1, **options: Any) -> list[Any]:
    collate_fn = unmarked if options.get("batch_size") is None else without_marks
    loader = loader_class(Marked(dataset), collate_fn=collate_fn, **options)
    seed_all(7)
    return [describe(batch) for _ in range(epochs) for batch in loader if batch is not None]


def stream(loader: Any, epochs: int = 1) -> list[Any]:
    seed_all(7)
    return [describe(batch) for _ in range(epochs) for batch in loader]


def rest(iterator: Iterator[Any]) -> list[Any]:
    return [describe(batch) for batch in iterator]


def indices_of(loader: Any) -> list[Any]:
    return [sample.index for sample in loader.skipped]


# ---- The stream


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_stream_is_torchs_without_the_failing_samples(num_workers: int, shuffle: bool) -> None:
    dataset = Corrupt(COUNT, BAD)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": shuffle, "num_workers": num_workers}
    want = expected(dataset, torch.utils.data.DataLoader, epochs=2, **options)
    loader = DataLoader(dataset, **options, **SKIP)
    assert stream(loader, epochs=2) == want
    assert sorted(indices_of(loader)) == [*BAD]
    assert all(sample.times == 2 for sample in loader.skipped)
    assert loader.stats().skipped_samples == 2 * len(BAD)
    assert "left out of batches 12 times" in str(loader.stats())


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("seeding", ["batch", "sample"])
def test_random_numbers_of_the_others_are_the_same(num_workers: int, seeding: Any) -> None:
    dataset = Corrupt(COUNT, BAD)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seeding": seeding}
    want = expected(dataset, DataLoader, **options)
    assert stream(DataLoader(dataset, num_workers=num_workers, **options, **SKIP)) == want


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("seeding", ["batch", "sample"])
def test_samples_with_a_generator_on_several_threads(num_workers: int, seeding: Any) -> None:
    dataset = WithGenerator(COUNT, BAD)
    options: dict[str, Any] = {"batch_size": 6, "shuffle": True, "seeding": seeding}
    seed_all(7)
    whole = {int(index): row for batch in DataLoader(WithGenerator(COUNT, ()), **options)
             for index, row in zip(*batch, strict=True)}  # fmt: skip
    loader = DataLoader(dataset, num_workers=num_workers, fetch_threads=3, **options, **SKIP)
    seed_all(7)
    seen = {int(index): row for batch in loader for index, row in zip(*batch, strict=True)}
    assert sorted(seen) == [index for index in range(COUNT) if index not in BAD]
    assert all(torch.equal(row, whole[index]) for index, row in seen.items())


class WithGenerator(Corrupt):
    def __getitem__(self, index: int, generator: Any = None) -> Any:  # type: ignore[override]
        self.check(index)
        return index, torch.rand(3, generator=generator)


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("fetch_threads", [1, 3])
def test_large_samples(num_workers: int, fetch_threads: int) -> None:
    """A worker moves them into their rows of the batch as they are fetched."""
    dataset = Large(COUNT, (0, 5, 8, 9, 10, 11, 15))
    options: dict[str, Any] = {"batch_size": 4, "num_workers": num_workers}
    want = expected(dataset, torch.utils.data.DataLoader, **options)
    loader = DataLoader(dataset, fetch_threads=fetch_threads, **options, **SKIP)
    assert stream(loader) == want


class Large(Corrupt):
    def __getitem__(self, index: int) -> Any:
        self.check(index)
        return {"image": torch.full((64, 128), float(index)), "label": index}


@pytest.mark.parametrize("num_workers", WORKERS)
def test_items_without_batches_are_omitted(num_workers: int) -> None:
    dataset = Corrupt(COUNT, BAD)
    options: dict[str, Any] = {"batch_size": None, "num_workers": num_workers}
    want = expected(dataset, torch.utils.data.DataLoader, epochs=2, **options)
    loader = DataLoader(dataset, **options, **SKIP)
    assert stream(loader, epochs=2) == want
    assert indices_of(loader) == [*BAD]
    assert [sample.batch for sample in loader.skipped] == [*BAD]


@pytest.mark.parametrize("num_workers", WORKERS)
def test_many_omitted_items_in_a_row(num_workers: int) -> None:
    count = 3 * sys.getrecursionlimit()
    dataset = Corrupt(count, range(count - 1))
    loader = DataLoader(
        dataset, batch_size=None, num_workers=num_workers, max_skipped=count, **SKIP
    )
    assert len(list(loader)) == 1
    assert len(loader.skipped) == count - 1


def test_indices_of_a_subset_are_those_of_the_sampler() -> None:
    subset = Subset(Corrupt(COUNT, BAD), [1, 2, 3, 17])
    loader = DataLoader(subset, batch_size=2, **SKIP)
    want = expected(subset, torch.utils.data.DataLoader, batch_size=2)
    assert stream(loader) == want
    assert indices_of(loader) == [1, 3]


def test_a_sample_that_is_twice_in_a_batch_is_listed_once() -> None:
    loader = DataLoader(Corrupt(COUNT, BAD), batch_sampler=[[2, 1, 2], [2, 3]], **SKIP)
    assert len(list(loader)) == 2
    assert [(one.index, one.times) for one in loader.skipped] == [(2, 3)]


@pytest.mark.parametrize("num_workers", WORKERS)
def test_sampler_of_the_user(num_workers: int) -> None:
    dataset = Corrupt(23, BAD)
    options: dict[str, Any] = {"batch_size": 4, "sampler": Backwards(), "num_workers": num_workers}
    want = expected(dataset, torch.utils.data.DataLoader, **options)
    assert stream(DataLoader(dataset, **options, **SKIP)) == want


@pytest.mark.slow
def test_batches_in_any_order_are_all_delivered() -> None:
    dataset = Corrupt(COUNT, BAD)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seeding": "batch"}
    want = expected(dataset, DataLoader, **options)
    loader = DataLoader(dataset, num_workers=2, in_order=False, **options, **SKIP)
    assert sorted(map(repr, stream(loader))) == sorted(map(repr, want))
    assert sorted(indices_of(loader)) == [*BAD]


@pytest.mark.slow
@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_persistent_workers(seeding: Any) -> None:
    dataset = Corrupt(COUNT, BAD)
    options: dict[str, Any] = {
        "batch_size": 4, "num_workers": 2, "persistent_workers": True, "seeding": seeding
    }  # fmt: skip
    want = expected(dataset, DataLoader, epochs=3, **options)
    with DataLoader(dataset, **options, **SKIP) as loader:
        assert stream(loader, epochs=3) == want
        assert [(one.epoch, one.times) for one in loader.skipped] == [(0, 3)] * len(BAD)


@pytest.mark.slow
def test_automatic_number_of_workers() -> None:
    dataset = Corrupt(COUNT, BAD)
    options: dict[str, Any] = {"batch_size": 2, "shuffle": True, "seeding": "sample"}
    want = expected(dataset, DataLoader, **options)
    with DataLoader(dataset, num_workers="auto", **options, **SKIP) as loader:
        assert stream(loader) == want


@pytest.mark.slow
def test_lookahead_passes_over_omitted_batches() -> None:
    loader = DataLoader(Corrupt(COUNT, BAD), batch_size=4, num_workers=1, prefetch_factor=4, **SKIP)
    iterator: Any = iter(loader)
    ahead = iterator.lookahead(4, lambda batch: batch[0].tolist())
    assert ahead == [[0, 1, 3], [4, 5, 6, 7], [12, 13, 14, 15]]
    assert [batch[0].tolist() for batch in iterator] == [*ahead, [16, 18, 19], [20, 21, 22, 23]]
    assert loader.skipped[0].batch == 0 and loader.skipped[1].batch == 2


@pytest.mark.slow
def test_training_with_a_cut_is_the_same() -> None:
    case = CASES[0]
    arguments: dict[str, Any] = {"batch_size": 6, "shuffle": True, "num_workers": 2, **SKIP}
    dataset = FailingImages()
    reference: DataLoader[Any] = DataLoader(dataset, **arguments)
    reference_model = fresh(case.make_model)
    seed_all(7)
    want = [train(reference_model, reference, case.loss) for _ in range(3)]
    loader: DataLoader[Any] = DataLoader(dataset, **arguments)
    model = offload(fresh(case.make_model), loader, cut="maximal", verify_every=2)
    seed_all(7)
    assert [train(model, loader, case.loss) for _ in range(3)] == want
    assert loader.plan is not None and loader.plan.moved
    assert loader.stats().boundary_batches > 0
    assert indices_of(loader) == indices_of(reference) != []


class FailingImages(Dataset[Any]):
    """Images and labels; every thirteenth fails."""

    def __init__(self) -> None:
        self.images, self.labels = zip(*(images(k) for k in range(9)), strict=True)

    def __len__(self) -> int:
        return 54

    def __getitem__(self, index: int) -> Any:
        if index % 13 == 5:
            raise LookupError(f"no image {index}")
        return self.images[index // 6][index % 6], self.labels[index // 6][index % 6]


# ---- Datasets that make whole batches


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("fetch_threads", [1, 3])
def test_failing_samples_of_whole_batches_are_found(num_workers: int, fetch_threads: int) -> None:
    dataset = CorruptBatches(COUNT, BAD)
    options: dict[str, Any] = {"batch_size": 4, "num_workers": num_workers}
    want = expected(Plain(COUNT, BAD), torch.utils.data.DataLoader, **options)
    loader = DataLoader(dataset, fetch_threads=fetch_threads, **options, **SKIP)
    assert stream(loader) == want
    assert indices_of(loader) == [*BAD]
    assert "no sample 2" in loader.skipped[0].message


class Plain(Corrupt):
    """The samples of CorruptBatches, one by one."""

    def __getitem__(self, index: int) -> Any:
        self.check(index)
        return index


def test_a_batch_that_fails_only_as_a_whole_is_left_out() -> None:
    class Apart(CorruptBatches):
        def __getitems__(self, indices: list[int]) -> list[int]:
            if 5 in indices and len(indices) > 1:
                raise LookupError("no batch")
            return indices

    loader = DataLoader(Apart(COUNT, ()), batch_size=4, **SKIP)
    assert [batch.tolist() for batch in loader][:2] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert indices_of(loader) == [4, 5, 6, 7]
    assert all(sample.message == "no batch" for sample in loader.skipped)


def test_a_batch_that_fails_once_is_complete() -> None:
    class Once(CorruptBatches):
        has_failed = False

        def __getitems__(self, indices: list[int]) -> list[int]:
            if 5 in indices and not self.has_failed:
                self.has_failed = True
                raise LookupError("the server is restarted")
            return indices

    loader = DataLoader(Once(COUNT, ()), batch_size=4, **SKIP)
    assert [len(batch) for batch in loader] == [4] * 6
    assert loader.skipped == ()


def test_items_of_a_dataset_with_whole_batches() -> None:
    loader = DataLoader(CorruptBatches(COUNT, BAD), batch_size=None, **SKIP)
    assert list(loader) == [index for index in range(COUNT) if index not in BAD]


# ---- The list


@pytest.mark.parametrize("num_workers", WORKERS)
def test_records_have_the_place_and_the_exception(num_workers: int) -> None:
    loader = DataLoader(Corrupt(COUNT, [17]), batch_size=4, num_workers=num_workers, **SKIP)
    for _ in range(2):
        list(loader)
    (sample,) = loader.skipped
    assert sample == SkippedSample(
        index=17,
        error="LookupError",
        message="no sample 17",
        place=sample.place,
        epoch=0,
        batch=4,
        times=2,
    )
    assert sample.place.startswith("pool_datasets.py:") and sample.place.endswith("in __getitem__")
    assert str(sample) == (
        f"sample 17 of batch 4 of epoch 0, 2 times (LookupError: no sample 17; {sample.place})"
    )
    assert pickle.loads(pickle.dumps(sample)) == sample
    assert SkippedSample(**json.loads(json.dumps(asdict(sample)))) == sample


class Ugly(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("num_workers", WORKERS)
def test_odd_exceptions_and_indices_are_listed(num_workers: int) -> None:
    class Local(Exception):
        pass

    class Odd(Dataset[Any]):
        def __getitem__(self, index: Any) -> Any:
            if index == "ugly":
                raise Ugly
            if index == ("a", "tuple"):
                raise Local("x" * 1000)
            if isinstance(index, np.integer) or index == "surrogate":
                raise ValueError("\ud800\n...")
            return 1

    order = [["ugly", 0], [("a", "tuple"), 0], [np.int64(3), 0], ["surrogate", 0]]
    loader = DataLoader(Odd(), batch_sampler=order, num_workers=num_workers, **SKIP)
    assert [batch.tolist() for batch in loader] == [[1]] * 4
    ugly, local, number, text = loader.skipped
    assert ugly.message == "<RuntimeError in str()>" and ugly.error.endswith(".Ugly")
    assert local.index == "('a', 'tuple')" and len(local.message) == 300
    assert number.index == 3 and type(number.index) is int
    assert text.index == "surrogate" and text.message == "\\ud800 ..."
    assert json.loads(json.dumps(loader.state_dict()))["skipped"]["epoch"] == 1


def test_a_copy_of_a_loader_has_no_list() -> None:
    loader = DataLoader(Corrupt(COUNT, BAD), batch_size=4, **SKIP)
    list(loader)
    assert pickle.loads(pickle.dumps(loader)).skipped == ()
    assert loader.skipped != ()


def test_an_exception_is_not_kept() -> None:
    """Its traceback would keep the sample's variables alive."""

    class Held:
        pass

    held: list[weakref.ref[Any]] = []

    class Holding(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            pixels = Held()
            held.append(weakref.ref(pixels))
            if index % 2:
                raise LookupError
            return index

    gc.disable()
    try:
        iterator = iter(DataLoader(Holding(), batch_size=2, **SKIP))
        next(iterator)
        assert len(held) == 2 and all(one() is None for one in held)
        loader = DataLoader(Holding(), batch_size=4, max_skipped=1, **SKIP)
        with pytest.raises(LookupError):
            next(iter(loader))
        assert all(one() is None for one in held)
    finally:
        gc.enable()


# ---- The log


def test_the_first_samples_and_each_epoch_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(Corrupt(COUNT, range(0, COUNT, 2)), batch_size=1, **SKIP)
    with caplog.at_level(logging.WARNING, logger.name):
        list(loader)
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 11
        assert lines[0] == (
            f"penstock: {loader.skipped[0]} was left out; it is number 1 of at most 100"
        )
        assert "lists the following ones, which are not logged" in lines[9]
        assert lines[10] == (
            "penstock: epoch 0 ended with 12 samples left out, and 12 batches without samples; "
            "loader.skipped lists 12 of at most 100"
        )
        list(loader)
        assert [record.getMessage() for record in caplog.records][11:] == [
            "penstock: epoch 1 ended with 12 samples left out, and 12 batches without samples; "
            "loader.skipped lists 12 of at most 100"
        ]


def test_nothing_is_logged_without_failures(caplog: pytest.LogCaptureFixture) -> None:
    list(DataLoader(Corrupt(COUNT, ()), batch_size=4, **SKIP))
    assert caplog.records == []


# ---- The limit


@pytest.mark.parametrize("num_workers", WORKERS)
def test_one_sample_more_than_the_limit_is_raised(
    num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": num_workers}
    loader = DataLoader(Corrupt(COUNT, BAD), max_skipped=2, **options, **SKIP)
    for epoch in range(2):
        iterator = iter(loader)
        assert [len(next(iterator)[0]) for _ in range(2)] == [3, 4]
        with pytest.raises(LookupError, match="no sample 8") as caught:
            next(iterator)
        assert caught.type is LookupError
        notes = "\n".join(getattr(caught.value, "__notes__", ["max_skipped=2"]))
        assert "max_skipped=2" in notes
        assert "max_skipped=2; loader.skipped lists them" in caplog.text
        if num_workers:
            assert str(caught.value).startswith("Caught LookupError in DataLoader worker process 0")
            assert "(sample 8 of the dataset)" in str(caught.value)
        assert indices_of(loader) == ([2] if epoch == 0 else [2, 17])
        assert [len(batch[0]) for batch in iterator] == [4, 3, 4], "the epoch goes on, as in torch"
        assert indices_of(loader) == [2, 17]
    state = loader.state_dict()
    assert state["_num_yielded"] == 5


def test_the_limit_counts_different_samples() -> None:
    loader = DataLoader(Corrupt(COUNT, BAD), batch_size=4, max_skipped=len(BAD), **SKIP)
    for _ in range(3):
        assert len(list(loader)) == 5
    assert {sample.times for sample in loader.skipped} == {3}


@needs_notes
def test_the_sample_and_the_limit_are_noted() -> None:
    loader = DataLoader(Corrupt(COUNT, BAD), batch_size=12, max_skipped=1, **SKIP)
    with pytest.raises(LookupError, match="no sample 2") as caught:
        next(iter(loader))
    first, second = caught.value.__notes__
    assert "would exceed max_skipped=1" in first and second == "raised for sample 2 of the dataset"


@pytest.mark.slow
def test_an_unpicklable_exception_is_raised_by_its_text() -> None:
    class Local(Exception):
        pass

    class Fails(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            raise Local(f"local {index}")

    loader = DataLoader(Fails(), batch_size=2, num_workers=1, max_skipped=3, **SKIP)
    iterator = iter(loader)
    with pytest.raises(RuntimeError, match="local 2"):
        next(iterator)
    assert [sample.message for sample in loader.skipped] == ["local 0", "local 1"]


# ---- What is raised as ever


class Raises(Dataset[int]):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise self.error
        return index


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("fetch_threads", [1, 2])
@pytest.mark.parametrize("error", [MemoryError("full"), torch.OutOfMemoryError("full")])
def test_shortage_of_memory_is_raised(
    error: BaseException, fetch_threads: int, num_workers: int
) -> None:
    loader = DataLoader(
        Raises(error), batch_size=2, fetch_threads=fetch_threads, num_workers=num_workers, **SKIP
    )
    with pytest.raises(type(error), match="full"):
        list(loader)
    assert loader.skipped == ()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupt_and_an_exit_are_raised(error: BaseException) -> None:
    with pytest.raises(type(error)):
        list(DataLoader(Raises(error), batch_size=2, **SKIP))


def test_a_stop_iteration_ends_the_epoch_as_in_torch() -> None:
    dataset = Raises(StopIteration())
    want = [batch.tolist() for batch in torch.utils.data.DataLoader(dataset, batch_size=2)]
    assert [batch.tolist() for batch in DataLoader(dataset, batch_size=2, **SKIP)] == want


def fails_to_collate(samples: list[Any]) -> Any:
    raise LookupError("no batch")


def fails_to_begin(worker_id: int) -> None:
    raise LookupError("no worker")


@pytest.mark.parametrize("num_workers", WORKERS)
def test_errors_of_collate_fn_are_raised(num_workers: int) -> None:
    loader = DataLoader(
        Corrupt(8, [1]), batch_size=4, collate_fn=fails_to_collate, num_workers=num_workers, **SKIP
    )
    iterator = iter(loader)
    for _ in range(2):
        with pytest.raises(LookupError, match="no batch"):
            next(iterator)
    assert loader.skipped == (), "the batch with the failed sample was not delivered"


@pytest.mark.slow
def test_errors_of_worker_init_fn_are_raised() -> None:
    loader = DataLoader(
        Corrupt(8, ()), batch_size=4, worker_init_fn=fails_to_begin, num_workers=1, **SKIP
    )
    with pytest.raises(LookupError, match="no worker"):
        next(iter(loader))


@pytest.mark.slow
def test_a_partial_batch_that_cannot_be_sent_is_raised() -> None:
    def unsendable(samples: list[Any]) -> Any:
        return lambda: samples

    loader = DataLoader(Corrupt(8, [1]), batch_size=8, collate_fn=unsendable, num_workers=1, **SKIP)
    with pytest.raises(Exception, match=r"pickle|local object"):
        next(iter(loader))
    assert loader.skipped == ()


# ---- States


def begun(loader: Any, count: int) -> tuple[list[Any], dict[str, Any]]:
    """Take ``count`` batches; return them and the state after them."""
    seed_all(7)
    iterator = iter(loader)
    taken = [describe(next(iterator)) for _ in range(count)]
    return taken, through_json(loader.state_dict())


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
def test_a_resumed_stream_and_list_are_those_of_one_run(num_workers: int, count: int) -> None:
    def make(workers: int) -> Any:
        return DataLoader(
            Corrupt(COUNT, BAD), 4, num_workers=workers, seeding="batch", max_skipped=6, **SKIP
        )

    whole = make(num_workers)
    want = stream(whole)
    taken, state = begun(make(num_workers), count)
    for workers in {0, num_workers}:
        loader = make(workers)
        loader.load_state_dict(state)
        before = loader.skipped
        assert [one["index"] for one in state["skipped"]["samples"]] == [
            one.index for one in before
        ]
        seed_all(3)
        assert taken + rest(iter(loader)) == want
        assert loader.skipped == whole.skipped
        list(loader)
        assert {one.times for one in loader.skipped} == {2}
        assert loader.stats().skipped_samples == 2 * len(BAD)


@pytest.mark.parametrize("num_workers", WORKERS)
def test_the_limit_spans_resumed_runs(num_workers: int) -> None:
    def make() -> Any:
        return DataLoader(Corrupt(COUNT, BAD), 4, num_workers=num_workers, max_skipped=5, **SKIP)

    _, state = begun(make(), 3)  # the batches 0, 1 and 3, without a sample of 2
    assert [one["index"] for one in state["skipped"]["samples"]] == [*BAD[:5]]
    loader = make()
    loader.load_state_dict(state)
    with pytest.raises(LookupError, match="no sample 17"):
        next(iter(loader))
    assert indices_of(loader) == [*BAD[:5]]


def test_epochs_are_counted_across_runs() -> None:
    dataset = Corrupt(COUNT, ())
    loader = DataLoader(dataset, 4, **SKIP)
    list(loader)
    _, state = begun(loader, 2)
    other = DataLoader(Corrupt(COUNT, [21]), 4, **SKIP)
    other.load_state_dict(state)
    assert len(list(other)) == 4
    assert [(one.epoch, one.batch) for one in other.skipped] == [(1, 5)]
    between = through_json(other.state_dict())
    third = DataLoader(Corrupt(COUNT, [0]), 4, **SKIP)
    third.load_state_dict(between)
    list(third)
    assert [(one.index, one.epoch) for one in third.skipped] == [(21, 1), (0, 2)]


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_run_that_an_exception_ended_goes_on_with_skip(num_workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": num_workers, "seeding": "batch"}
    want = stream(DataLoader(Corrupt(COUNT, BAD), **options, **SKIP))
    seed_all(7)
    loader = DataLoader(Corrupt(COUNT, [*BAD[1:]]), **options)
    iterator = iter(loader)
    taken = [describe(next(iterator)) for _ in range(2)]
    state = loader.state_dict()
    with pytest.raises(LookupError, match="no sample 8"):
        next(iterator)
    assert "skipped" not in state
    resumed = DataLoader(Corrupt(COUNT, BAD), **options, **SKIP)
    resumed.load_state_dict(state)
    assert taken[1:] + rest(iter(resumed)) == want[1:]
    assert indices_of(resumed) == [*BAD[1:]]


def test_a_state_keeps_its_list_in_a_loader_that_raises() -> None:
    _, state = begun(DataLoader(Corrupt(COUNT, BAD), 4, **SKIP), 1)
    loader = DataLoader(Corrupt(COUNT, BAD), 4)
    loader.load_state_dict(state)
    assert loader.state_dict()["skipped"] == state["skipped"]
    iterator = iter(loader)
    next(iterator)
    assert indices_of(loader) == [2]
    assert loader.state_dict()["skipped"] == state["skipped"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_state_with_batches_in_any_order(count: int) -> None:
    options: dict[str, Any] = {"batch_size": 4, "seeding": "batch", **SKIP}
    want = stream(DataLoader(Corrupt(COUNT, BAD), **options))
    taken, state = begun(
        DataLoader(Corrupt(COUNT, BAD), num_workers=2, in_order=False, **options), count
    )
    loader = DataLoader(Corrupt(COUNT, BAD), num_workers=2, in_order=False, **options)
    loader.load_state_dict(state)
    everything = taken + rest(iter(loader))
    assert sorted(map(repr, everything)) == sorted(map(repr, want))
    assert sorted(indices_of(loader)) == [*BAD]
    assert loader.stats().skipped_samples == len(BAD), "no batch is made twice"


class Stepping(Corrupt):
    """Counts its calls, in a state."""

    asked = 0

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        self.check(index)
        return index, self.asked

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_states_of_a_dataset_travel_with_the_report(
    num_workers: int, every: int, count: int
) -> None:
    def make() -> Any:
        loader = DataLoader(
            Stepping(COUNT, BAD), 4, num_workers=num_workers, snapshot_every_n_steps=every, **SKIP
        )
        loader.state_dict()  # the workers send states from now on
        return loader

    want = stream(make())
    taken, state = begun(make(), count)
    loader = make()
    loader.load_state_dict(state)
    assert taken + rest(iter(loader)) == want
    assert indices_of(loader) == [*BAD]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((), []),
        (("samples",), {}),
        (("samples", 0), None),
        (("samples", 0, "index"), 1.5),
        (("samples", 0, "message"), b"bytes"),
        (("samples", 0, "times"), -1),
        (("epoch",), "0"),
    ],
)
def test_a_list_of_another_form_is_refused_by_its_place(place: Any, value: Any) -> None:
    _, state = begun(DataLoader(Corrupt(COUNT, BAD), 4, **SKIP), 1)
    parent, *path = ("skipped", *place)
    holder: Any = state
    for name in path:
        holder, parent = holder[parent], name
    holder[parent] = value
    with pytest.raises(ValueError, match=r"state\['skipped'\]"):
        DataLoader(Corrupt(COUNT, BAD), 4, **SKIP).load_state_dict(state)


def test_a_list_with_another_part_is_refused() -> None:
    _, state = begun(DataLoader(Corrupt(COUNT, BAD), 4, **SKIP), 1)
    state["skipped"]["samples"][0]["more"] = 1
    with pytest.raises(ValueError, match="without other keys"):
        DataLoader(Corrupt(COUNT, BAD), 4, **SKIP).load_state_dict(state)


# ---- Ranks


@needs_notes
@pytest.mark.parametrize("num_workers", WORKERS)
def test_an_empty_batch_of_a_rank_is_raised(num_workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": num_workers, **SKIP}
    dataset = Corrupt(COUNT, BAD)
    for loader in (
        DataLoader(dataset, ranks=Ranks(0, 1), **options),
        DataLoader(dataset, sampler=DistributedSampler(dataset, 1, 0, shuffle=False), **options),
    ):
        iterator = iter(loader)
        assert [len(next(iterator)[0]) for _ in range(2)] == [3, 4]
        with pytest.raises(LookupError, match="no sample 8") as caught:
            next(iterator)
        assert "same number of steps" in caught.value.__notes__[0]
        assert len(list(iterator)) == 3
        assert indices_of(loader) == [2, 17]


def test_a_state_of_all_ranks_has_no_list_of_one() -> None:
    def ranks() -> list[Any]:
        return [
            DataLoader(Corrupt(COUNT, [2, 17]), 4, ranks=Ranks(rank, 2), **SKIP)
            for rank in range(2)
        ]

    whole = [stream(loader) for loader in ranks()]
    halves = [begun(loader, 1) for loader in ranks()]
    assert halves[0][1] == halves[1][1] and "skipped" not in halves[0][1]
    resumed = ranks()
    for loader, (taken, state), want in zip(resumed, halves, whole, strict=True):
        loader.load_state_dict(state)
        assert taken + rest(iter(loader)) == want
    assert [indices_of(loader) for loader in resumed] == [[17], []]


# ---- Options


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: DataLoader(Numbers(), on_error="skip"), ValueError, "requires a map-style"),
        (lambda: DataLoader(SequenceWrapper([1]), on_error="skip"), ValueError, "a datapipe"),
        (lambda: DataLoader([1], on_error="ignore"), ValueError, "must be 'raise' or 'skip'"),
        (lambda: DataLoader([1], on_error=None), ValueError, "must be 'raise' or 'skip'"),
        (lambda: DataLoader([1], on_error="skip", max_skipped=0), ValueError, "1 or more"),
        (lambda: DataLoader([1], on_error="skip", max_skipped=1.5), TypeError, "an int"),
        (lambda: DataLoader([1], on_error="skip", max_skipped=True), TypeError, "an int"),
        (lambda: DataLoader([1], max_skipped=5), ValueError, "requires on_error='skip'"),
    ],
)
def test_values_that_have_no_meaning_are_refused(
    make: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize("num_workers", WORKERS)
def test_the_option_may_be_assigned_between_epochs(num_workers: int) -> None:
    with DataLoader(
        Corrupt(8, [1]), 4, num_workers=num_workers, persistent_workers=num_workers > 0
    ) as loader:
        with pytest.raises(LookupError):
            next(iter(loader))
        loader.on_error = "skip"
        assert [len(batch[0]) for batch in loader] == [3, 4]
        loader.on_error = "raise"
        with pytest.raises(LookupError):
            next(iter(loader))
        assert "on_error='skip'" not in repr(loader)
        assert penstock.SkippedSample is type(loader.skipped[0])


# ---- Pools

POOLED = [2, 8, 9, 10, 11, 17, 40, 41]


@pytest.fixture
def pool(steady_pool: PoolProcesses) -> PoolProcesses:
    return steady_pool


def pooled(pool: PoolProcesses, dataset: Any, **options: Any) -> DataLoader[Any]:
    options = {"batch_size": 4, "timeout": 60, **SKIP, **options}
    return DataLoader(dataset, pool=Pool(pool.endpoint, code_paths=[CODE]), **options)


@pytest.mark.slow
@pytest.mark.parametrize("seeding", ["batch", "sample"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_pools_stream_and_list_are_those_of_one_process(
    pool: PoolProcesses, num_workers: int, seeding: Any
) -> None:
    alone = DataLoader(Corrupt(60, POOLED), 4, shuffle=True, seeding=seeding, **SKIP)
    want = stream(alone, epochs=2)
    loader = pooled(
        pool, Corrupt(60, POOLED), shuffle=True, seeding=seeding, num_workers=num_workers
    )
    assert stream(loader, epochs=2) == want
    assert [asdict(one) for one in loader.skipped] == [asdict(one) for one in alone.skipped]


@pytest.mark.slow
def test_a_pool_omits_batches_and_items_without_samples(pool: PoolProcesses) -> None:
    for options in ({}, {"batch_size": None}, {"in_order": False}):
        alone = DataLoader(
            Corrupt(60, POOLED), **{"batch_size": 4, "seeding": "batch", **SKIP, **options}
        )
        loader = pooled(pool, Corrupt(60, POOLED), **options)
        want = stream(alone)
        assert sorted(map(repr, stream(loader))) == sorted(map(repr, want))
        assert sorted(indices_of(loader)) == POOLED


@pytest.mark.slow
@pytest.mark.parametrize("in_order", [True, False])
def test_a_stream_of_a_pool_is_resumed(pool: PoolProcesses, in_order: bool) -> None:
    want = stream(DataLoader(Corrupt(60, POOLED), 4, seeding="batch", **SKIP))
    for count in (1, 2, 5):
        taken, state = begun(pooled(pool, Corrupt(60, POOLED), in_order=in_order), count)
        assert state["shards"]["states"] is None
        for loader in (
            pooled(pool, Corrupt(60, POOLED), in_order=in_order),
            DataLoader(Corrupt(60, POOLED), 4, seeding="batch", **SKIP),
        ):
            loader.load_state_dict(state)
            everything = taken + rest(iter(loader))
            assert sorted(map(repr, everything)) == sorted(map(repr, want))
            assert sorted(indices_of(loader)) == POOLED
            assert loader.stats().skipped_samples == len(POOLED)


@pytest.mark.slow
def test_the_limit_holds_for_a_pool(pool: PoolProcesses) -> None:
    loader = pooled(pool, Corrupt(60, POOLED), max_skipped=2)
    iterator = iter(loader)
    assert [len(next(iterator)[0]) for _ in range(2)] == [3, 4]
    with pytest.raises(LookupError, match="no sample 8") as caught:
        next(iterator)
    assert str(caught.value).startswith("Caught LookupError in a penstock worker (")
    assert "(sample 8 of the dataset)" in str(caught.value)
    assert [len(next(iterator)[0]) for _ in range(7)] == [4, 3, 4, 4, 4, 4, 4]
    with pytest.raises(LookupError, match="no sample 40"):
        next(iterator)
    assert len(list(iterator)) == 4
    assert indices_of(loader) == [2, 17]


@pytest.mark.slow
def test_an_own_exception_is_a_worker_error(pool: PoolProcesses) -> None:
    class Own(Exception):
        pass

    class Fails(Dataset[int]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            raise Own(f"own {index}")

    loader = pooled(pool, Fails(), max_skipped=1)
    with pytest.raises(WorkerError, match="own 0"):
        next(iter(loader))


REPORT = SkipReport(
    number=3,
    is_omitted=False,
    samples=(SampleFailure(7, "LookupError", "no 7", "data.py:3, in __getitem__", 1),),
    error=("LookupError", "no 7"),
)


def test_a_report_of_a_pools_worker_is_read_as_it_was_written() -> None:
    assert SkipReport.of_plain(REPORT.to_plain()) == REPORT


@pytest.mark.parametrize(
    "report",
    [
        REPORT._replace(number=-1),
        REPORT._replace(number="3"),
        REPORT._replace(is_omitted=1),
        REPORT._replace(samples=(REPORT.samples[0]._replace(sample_index=[1]),)),
        REPORT._replace(samples=(REPORT.samples[0]._replace(message=7),)),
        REPORT._replace(samples=(REPORT.samples[0]._replace(place="x" * 301),)),
        REPORT._replace(samples=(REPORT.samples[0]._replace(error="two\nlines"),)),
        REPORT._replace(samples=(REPORT.samples[0]._replace(times=-1),)),
        REPORT._replace(error=("LookupError", None)),
    ],
)
def test_a_report_of_another_form_is_refused(report: Any) -> None:
    with pytest.raises(PenstockError, match="the same version of penstock"):
        SkipReport.of_plain(report.to_plain())


@pytest.mark.parametrize("value", [None, 3, (), (1, True), [1, True, 5, ("a", "b")]])
def test_a_report_that_is_no_report_is_refused(value: Any) -> None:
    with pytest.raises(PenstockError):
        SkipReport.of_plain(value)
