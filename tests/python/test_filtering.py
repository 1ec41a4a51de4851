# SPDX-License-Identifier: Apache-2.0
"""Filtered datasets: batches of the samples that a predicate accepts, for any workers and ranks."""

from __future__ import annotations

import json
import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filter_job
import numpy as np
import pytest
import torch
from filter_job import LENGTH, STEP_SIZE, Numbers, is_kept, make_loader, refuse
from gloo_ranks import GlooRanks
from pool_datasets import CODE
from pool_processes import PoolProcesses
from stream_oracle import error_of
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from penstock import CostBatchSampler, DataLoader, MixtureSampler, Pool, Ranks, filtered
from penstock.loader.data_version import dataset_fingerprint

JOB = Path(filter_job.__file__)
KEPT = [index for index in range(LENGTH) if is_kept((index, 0))]


class Augmented(Dataset[Any]):
    """Samples (index, values): the values are drawn from all global generators."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(3) + random.random() + float(np.random.rand())


class InLists(Augmented):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert len(indices) > 0
        return [self[index] for index in indices]


class Seeded(Augmented):
    def __getitem__(self, index: int, *, generator: Any) -> Any:  # type: ignore[override]
        return index, torch.rand(3, generator=generator)


def every_third(sample: Any) -> bool:
    return bool(sample[0] % 3 == 1)


def same(left: Any, right: Any) -> bool:
    return len(left) == len(right) and all(
        torch.equal(mine, yours)
        for one, other in zip(left, right, strict=True)
        for mine, yours in zip(one, other, strict=True)
    )


def oracle(order: list[int], batch_size: int = 5) -> list[Any]:
    """Return torch's batches of the samples of an order that the predicate accepts."""
    rows = [Numbers()[index] for index in order]
    accepted = [row for row in rows if is_kept(row)]
    return list(torch.utils.data.DataLoader(accepted, batch_size=batch_size))  # type: ignore[arg-type]


def shuffled() -> tuple[list[int], list[int]]:
    """Return an order of the dataset, and the same order of the filtered dataset."""
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(3)).tolist()
    return order, [KEPT.index(index) for index in order if index in KEPT]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_are_full_batches_of_the_accepted_samples(workers: int) -> None:
    kept = filtered(Numbers(), is_kept, num_workers=workers)
    assert list(kept.indices) == KEPT and len(kept) == len(KEPT)
    loader = DataLoader(kept, batch_size=5, num_workers=workers)
    got = [indices for indices, _ in loader]
    expected = [indices for indices, _ in oracle(list(range(LENGTH)))]
    assert all(map(torch.equal, got, expected)) and len(got) == len(expected) == len(loader)
    order, places = shuffled()
    loader = DataLoader(kept, batch_size=5, sampler=places, num_workers=workers)
    assert [one.tolist() for one, _ in loader] == [one.tolist() for one, _ in oracle(order)]


@pytest.mark.parametrize("dataset", [Augmented(), InLists(), Seeded()])
def test_streams_are_those_of_a_torch_subset(dataset: Any) -> None:
    expected: Any = Subset(dataset, [index for index in range(120) if index % 3 == 1])
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for options in ({}, {"num_workers": 2}):
        kept = filtered(dataset, every_third, **options)
        torch.manual_seed(5)
        got = list(DataLoader(kept, batch_size=4, shuffle=True, num_workers=2, seeding="sample"))
        torch.manual_seed(5)
        plain = list(DataLoader(expected, 4, shuffle=True, num_workers=0, seeding="sample"))
        assert same(got, plain)
    torch.set_rng_state(before[0])
    filtered(dataset, every_third)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


@pytest.mark.slow
def test_pool_evaluates_the_predicate(steady_pool: PoolProcesses) -> None:
    given = Pool(steady_pool.endpoint, code_paths=[CODE])
    kept = filtered(Numbers(), lambda sample: sample[0] % 7 in (0, 3, 4), pool=given)
    assert list(kept.indices) == KEPT
    local, pooled = make_loader(kept), make_loader(kept, pool=given)
    assert same(list(pooled), list(local))
    assert error_of(lambda: filtered(Numbers(), refuse, pool=given)).__class__ is ValueError
    pooled.close()


def steps_of(
    kept: Any, state: Any, world_size: int, count: int, workers: int, **options: Any
) -> Any:
    """Return the samples of the next steps, in the order of the job, and the states of ranks."""
    ranks = [Ranks(rank, world_size, global_batch_size=STEP_SIZE) for rank in range(world_size)]
    loaders = [make_loader(kept, one, num_workers=workers, **options) for one in ranks]
    for loader in loaders if state is not None else []:
        loader.load_state_dict(state)
    iterators = [iter(loader) for loader in loaders]
    steps = []
    for _ in range(count):
        batches = [next(one, None) for one in iterators]
        assert len({batch is None for batch in batches}) == 1  # all ranks end together
        if batches[0] is None:
            break
        steps.append([torch.cat(part) for part in zip(*batches, strict=True)])
    return steps, [json.loads(json.dumps(loader.state_dict())) for loader in loaders]


def test_ranks_have_equal_steps_and_resume_at_other_counts() -> None:
    order, places = shuffled()
    options = {"sampler": places, "shuffle": None}
    expected, _ = steps_of(filtered(Numbers(), is_kept), None, 1, 99, 0, **options)
    steps = oracle(order, STEP_SIZE)
    assert [one.tolist() for one, _ in expected] == [one.tolist() for one, _ in steps]
    got, state = [], None
    for world_size, count, workers in ((2, 4, 1), (4, 5, 0), (1, 2, 3), (2, 99, 0)):
        kept = filtered(Numbers(), is_kept, num_workers=workers)
        steps, states = steps_of(kept, state, world_size, count, workers, **options)
        got += steps
        state = states[-1]
    assert len(KEPT) % STEP_SIZE % 2 == 1  # so the last step of two ranks has one sample twice
    assert same(got[:-1], expected[:-1]) and len(got) == len(expected)
    assert set(got[-1][0].tolist()) == set(expected[-1][0].tolist())


@pytest.mark.slow
def test_ranks_of_a_job_share_the_evaluation(tmp_path: Path) -> None:
    def run(name: str, world_size: int, **given: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        job = GlooRanks(JOB, folder, world_size, given, environment)
        job.finish_all()
        return folder

    def reads(folder: Path, rank: int) -> list[int]:
        return [*map(int, (folder / f"read-{rank}").read_text().split())]

    def batches(folder: Path, world_size: int) -> list[list[Any]]:
        lines = [(folder / f"rank-{rank}").read_text().splitlines() for rank in range(world_size)]
        steps = zip(*(map(json.loads, one) for one in lines), strict=True)
        return [[sum(part, []) for part in zip(*step, strict=True)] for step in steps]

    cache = str(tmp_path / "kept.idx")
    first = run("first", 2, leave_after=4, cache=cache, fails=1)
    counts = [len(reads(first, rank)) for rank in range(2)]
    assert sum(counts) == LENGTH + 64 and abs(counts[0] - counts[1]) < 8
    assert {*reads(first, 0), *reads(first, 1)} == {*range(LENGTH)}
    expected, _ = steps_of(filtered(Numbers(), is_kept), None, 1, 99, 0)
    plain = [[part.tolist() for part in step] for step in expected]
    assert batches(first, 2) == plain[:5]
    rest = run("rest", 3, state=str(first / "state-1.pt"), cache=cache)
    assert sum(len(reads(rest, rank)) for rank in range(3)) == 64  # only the comparison
    assert batches(rest, 3)[:-1] == plain[5:-1]
    assert "raised LookupError: no answer for" in (first / "error-1").read_text()
    text = (first / "error-0").read_text()
    assert text.startswith("RankError: rank 1 could not evaluate its part") and "no answer" in text


def test_inputs_take_the_place_of_samples() -> None:
    class Unread(Numbers):
        def __getitem__(self, index: int) -> Any:
            raise AssertionError("a sample was read")

    for inputs in (
        [index % 7 for index in range(LENGTH)],
        torch.arange(LENGTH) % 7,
        np.arange(LENGTH) % 7,
    ):
        kept = filtered(Unread(), lambda value: value >= 5, inputs=inputs)
        assert list(kept.indices) == [index for index in range(LENGTH) if index % 7 >= 5]


def test_samplers_and_mixtures_take_filtered_datasets() -> None:
    first, second = filtered(Numbers(), is_kept), filtered(Numbers(), every_third)
    sampler = MixtureSampler([len(first), len(second)], [0.5, 0.5])
    loader = DataLoader(ConcatDataset([first, second]), batch_size=4, sampler=sampler)
    indices = [index for batch in loader for index in batch[0].tolist()]
    assert len(indices) - 2 * len(second) in (0, 1)
    assert set(indices[1::2]) == set(second.indices)
    costs = np.arange(1, LENGTH + 1)[np.asarray(first.indices)]
    budgeted = DataLoader(first, batch_sampler=CostBatchSampler(costs, 900))
    assert sorted(int(index) for batch in budgeted for index in batch[0]) == KEPT
    with DataLoader(first, 4, commit="manual", seeding="batch", num_workers=1) as manual:
        for batch in manual:
            manual.commit(batch)
        assert manual.outstanding == ()


def test_progress_and_indices() -> None:
    seen: list[tuple[int, int]] = []
    kept = filtered(Numbers(), is_kept, num_workers=1, progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (LENGTH + 64, LENGTH + 64)
    assert seen == sorted(seen) and {total for _, total in seen} == {LENGTH + 64}
    threaded = filtered(Numbers(), is_kept, num_workers=1, fetch_threads=3)
    assert list(threaded.indices) == KEPT
    again = pickle.loads(pickle.dumps(kept))
    assert list(again.indices) == KEPT
    assert kept.indices.itemsize == 8 and type(kept.indices[0]) is int  # type: ignore[attr-defined]


def test_selection_of_a_state_is_compared() -> None:
    loader = make_loader(filtered(Numbers(), is_kept))
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    make_loader(filtered(Numbers(), is_kept, num_workers=2)).load_state_dict(state)
    other = make_loader(filtered(Numbers(), lambda sample: sample[0] % 7 in (0, 3, 5)))
    assert len(other.dataset) == len(KEPT)
    error = error_of(lambda: other.load_state_dict(state))
    assert type(error) is ValueError and "selection" in str(error)
    # Ranks compare it, too.
    rows = TensorDataset(torch.arange(20))
    texts = [
        dataset_fingerprint(filtered(data, lambda row, rest=rest: row[0] % 4 == rest))  # type: ignore[misc]
        for data in (rows, TensorDataset(torch.arange(20) * 4 + torch.arange(20)))
        for rest in (0, 1)
    ]
    assert None not in texts and len(set(texts)) == 4
    assert dataset_fingerprint(filtered(rows, lambda row: row[0] % 4 == 1)) == texts[1]


def test_cache_is_read_and_compared(tmp_path: Path) -> None:
    cache = tmp_path / "kept.idx"
    kept = filtered(Numbers(), is_kept, cache=cache)
    whole = cache.read_bytes()
    assert len(whole) < 300 and [*tmp_path.iterdir()] == [cache]
    seen: list[tuple[int, int]] = []
    again = filtered(Numbers(), is_kept, cache=cache, progress=lambda *one: seen.append(one))
    assert list(again.indices) == list(kept.indices) and seen[-1] == (64, 64)
    error = error_of(lambda: filtered(Numbers(), lambda sample: sample[0] % 7 == 0, cache=cache))
    assert "cache must be of the same dataset and predicate" in str(error)
    error = error_of(lambda: filtered(Augmented(), every_third, cache=cache))
    assert f"with 120 samples, got {cache} of 403 samples" in str(error)
    for damaged in (b"", whole[:-1], b"{}\n", b"[1]\n", b"\xff\n", whole[:-3] + b"abc"):
        cache.write_bytes(damaged)
        error = error_of(lambda: filtered(Numbers(), is_kept, cache=cache))
        assert type(error) is ValueError and "damaged" in str(error)


class Remembering:
    """Accepts each value once, as a search for duplicates does."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def __call__(self, sample: Any) -> bool:
        is_new = sample[0] not in self.seen
        self.seen.add(sample[0])
        return is_new


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "predicate",
    [
        lambda sample: random.random() < 0.9,
        lambda sample: bool(torch.rand(()) < 0.5),
        lambda sample: float(sample[1][0]) < 1.5,  # of an augmented sample
        Remembering(),
    ],
)
def test_predicate_with_changing_answers_is_reported(predicate: Any, workers: int) -> None:
    if isinstance(predicate, Remembering) and workers:
        predicate = Remembering()
        workers = 1  # with more, a worker may see a sample for the first time twice
    error = error_of(lambda: filtered(Augmented(), predicate, num_workers=workers))
    assert type(error) is ValueError
    assert "predicate must give the same answer for the same sample" in str(error)


@pytest.mark.parametrize("workers", [0, 2])
def test_wrong_predicates_are_named(workers: int) -> None:
    def message(predicate: Any) -> str:
        error = error_of(lambda: filtered(Numbers(), predicate, num_workers=workers))
        assert type(error) is ValueError
        return str(error)

    assert "predicate must accept at least one sample, got none of 403" in message(
        lambda sample: False
    )
    text = message(lambda sample: sample[0] < 300 or sample["text"])
    assert "but raised TypeError" in text and "for sample 300" in text
    for answer in (None, 1, "yes", [True], torch.ones(2, dtype=torch.bool), np.int64(1)):
        text = message(lambda sample, answer=answer: answer)
        assert "predicate must return True or False, got" in text and "for sample 0" in text

    class Broken(Numbers):
        def __getitem__(self, index: int) -> Any:
            raise OSError(f"cannot read {index}")

    error = error_of(lambda: filtered(Broken(), is_kept, num_workers=workers))
    assert isinstance(error, OSError) and "cannot read 0" in str(error)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_invalid_arguments_are_refused() -> None:
    def refusal(*args: Any, **options: Any) -> BaseException:
        error = error_of(lambda: filtered(*args, **options))
        assert error is not None
        return error

    numbers = Numbers()
    for error, kind, words in (
        (refusal(Stream(), is_kept), ValueError, "dataset must be map-style"),
        (refusal({1}, is_kept), ValueError, "got set"),
        (refusal([], is_kept), ValueError, "at least one sample, got an empty list"),
        (refusal(numbers, "text"), TypeError, "predicate must be callable, got 'text'"),
        (refusal(numbers, is_kept, inputs=[1]), ValueError, "each of the 403 samples, got 1"),
        (refusal(numbers, is_kept, ranks=2), TypeError, "ranks must be a Ranks or None"),
        (refusal(numbers, is_kept, ranks=Ranks(0, 2)), ValueError, "requires a process group"),
        (
            refusal(numbers, is_kept, ranks=Ranks(replica_group=[0])),
            ValueError,
            "must have no replica_group",
        ),
        (refusal(numbers, is_kept, num_workers=-1), ValueError, "num_workers"),
    ):
        assert type(error) is kind and words in str(error), error
    assert len(filtered(numbers, is_kept, ranks=Ranks(0, 1))) == len(KEPT)
