# SPDX-License-Identifier: Apache-2.0
"""``ranks=Ranks()`` with an iterable dataset: the ranks divide its shards."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import GlooRanks
from pool_processes import SECONDS_MAX, PoolProcesses
from shared_streams import Resumed, Uneven, by_shard
from torch.utils.data import IterDataPipe

from penstock import DataLoader, Ranks, merge_states

LENGTHS = [9, 14, 0, 21, 5, 11]
PROGRAM = Path(__file__).with_name("stream_job.py")


def loaders(dataset: Any, world_size: int, **options: Any) -> list[Any]:
    """The streams of all ranks. They are in one process, without a store, so each ends by
    itself."""
    options = {"batch_size": 3, "shards": len(dataset.lengths), **options}
    return [
        DataLoader(dataset, ranks=Ranks(rank=rank, world_size=world_size), **options)
        for rank in range(world_size)
    ]


def whole(ranks: list[Any]) -> list[list[Any]]:
    return [[batch.tolist() for batch in one] for one in ranks]


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "dataset", [Uneven(LENGTHS), Resumed(LENGTHS)], ids=lambda d: type(d).__name__
)
@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"batch_size": 1}], ids=str)
def test_shard_batches_are_independent_of_ranks_and_workers(
    dataset: Any, options: dict[str, Any]
) -> None:
    alone = loaders(dataset, 1, **options)
    expected = [by_shard(whole(alone)) for _ in range(2)]
    assert expected[0] != expected[1], "each epoch has draws of its own"
    for world_size, workers in [(1, 2), (2, 0), (2, 1), (3, 0), (3, 3), (4, 2), (6, 0)]:
        ranks = loaders(dataset, world_size, num_workers=workers, **options)
        assert [by_shard(whole(ranks)) for _ in range(2)] == expected


@pytest.mark.parametrize("world_size", [2, 3])
def test_step_takes_next_batches_in_shard_order(world_size: int) -> None:
    dataset = Uneven([9] * 6, kept=1.1)
    (alone,) = whole(loaders(dataset, 1))
    steps = zip(*whole(loaders(dataset, world_size)), strict=True)
    assert list(itertools.chain.from_iterable(steps)) == alone


def test_persistent_workers_match_in_process_epochs() -> None:
    dataset = Uneven(LENGTHS)
    expected = [whole(ranks) for ranks in [loaders(dataset, 2)] for _ in range(2)]
    ranks = loaders(dataset, 2, num_workers=1, persistent_workers=True)
    assert [whole(ranks) for _ in range(2)] == expected


class ResizedJob:
    """A job whose ranks are stopped after any step, and resume at another number."""

    def __init__(self, rng: random.Random, workers: list[int]) -> None:
        self.rng, self.workers = rng, workers
        kind = rng.choice([Uneven, Resumed])
        self.dataset = kind([rng.randrange(14) for _ in range(rng.randrange(1, 9))])
        self.options = {"batch_size": rng.choice([1, 2, 3, None])}
        self.expected = by_shard(self.batches(self.ranks(1), 10_000)[0])

    def ranks(self, world_size: int) -> list[Any]:
        workers = self.rng.choice(self.workers)
        return loaders(self.dataset, world_size, num_workers=workers, **self.options)

    def batches(self, ranks: list[Any], step_count: int) -> tuple[list[list[Any]], bool]:
        """The batches of each rank in steps that all ranks take, and whether there are no more."""
        iterators = [iter(one) for one in ranks]
        given: list[list[Any]] = [[] for _ in ranks]
        for _ in range(step_count):
            step = [next(iterator, None) for iterator in iterators]
            if any(batch is None for batch in step):
                return given, True
            for one, batch in zip(given, step, strict=True):
                one.append(batch.tolist() if batch.dim() > 1 else [batch.tolist()])
        self.iterators = iterators
        return given, False

    def live(self) -> tuple[int, int, bool]:
        """Returns how many batches were given, how many were left, and whether it ended."""
        shards = len(self.dataset.lengths)
        found: dict[int, list[Any]] = {}
        state: Any = None
        while True:
            ranks = self.ranks(self.rng.randrange(1, shards + 1))
            for one in ranks:
                if state is not None:
                    one.load_state_dict(plain(state))
                    assert one.state_dict() == plain(one.state_dict())
            given, is_over = self.batches(ranks, self.rng.choice([0, 1, 2, 5, 30]))
            for shard, batches in by_shard(given).items():
                found.setdefault(shard, []).extend(batches)
            for shard, batches in found.items():
                assert batches == self.expected[shard][: len(batches)], "no batch twice, none lost"
            if is_over:
                given_count = sum(map(len, found.values()))
                left_count = sum(map(len, self.expected.values())) - given_count
                return given_count, left_count, len(ranks) == 1
            states = [plain(one.state_dict()) for one in ranks]
            self.rng.shuffle(states)
            state = merge_states(states)


@pytest.mark.slow
@pytest.mark.parametrize(
    "count", [25, pytest.param(400, marks=pytest.mark.long)], ids=["25 lives", "400 lives"]
)
def test_resized_job_reads_every_batch_once(count: int) -> None:
    rng = random.Random(count)
    for _ in range(count):
        _, left_count, was_alone = ResizedJob(rng, [0]).live()
        assert not was_alone or left_count == 0, "a rank that is alone reads everything"


@pytest.mark.long
@pytest.mark.slow
def test_resized_job_with_workers_reads_batches_once() -> None:
    rng = random.Random(7)
    for _ in range(4):
        ResizedJob(rng, [0, 1, 2]).live()


def test_resume_at_same_size_matches_uninterrupted_run() -> None:
    dataset = Uneven(LENGTHS)
    expected = whole(loaders(dataset, 2))
    next_epoch = [whole(ranks) for ranks in [loaders(dataset, 2)] for _ in range(2)][1]
    for step in range(1, 5):
        before, after = loaders(dataset, 2), loaders(dataset, 2)
        iterators = [iter(one) for one in before]
        for iterator in iterators:
            list(itertools.islice(iterator, step))
        states = [one.state_dict() for one in before]
        for state in (None, merge_states(states)):
            for rank, one in enumerate(after):
                one.load_state_dict(plain(states[rank] if state is None else state))
            assert whole(after) == [batches[step:] for batches in expected]
            assert whole(after) == next_epoch


def test_state_between_epochs_is_equal_on_all_ranks() -> None:
    dataset = Uneven([6] * 4, kept=1.1)
    ranks = loaders(dataset, 2)
    whole(ranks)
    states = [plain(one.state_dict()) for one in ranks]
    assert states[0] == states[1] == merge_states(states)
    (alone,) = loaders(dataset, 1)
    alone.load_state_dict(states[1])
    assert by_shard(whole([alone])) == by_shard(whole(ranks))


def states_after(steps: list[int], dataset: Any, world_size: int) -> list[dict[str, Any]]:
    ranks = loaders(dataset, world_size)
    iterators = [iter(one) for one in ranks]
    for iterator, count in zip(iterators, steps, strict=True):
        list(itertools.islice(iterator, count))
    return [one.state_dict() for one in ranks]


def test_merging_inconsistent_states_is_rejected() -> None:
    dataset, other = Uneven([9] * 4), Uneven([9] * 6)
    two = states_after([2, 2], dataset, 2)
    mixed = [two[0], states_after([1, 1], dataset, 2)[1]]
    ranks = loaders(dataset, 2)
    whole(ranks)
    ended = ranks[1].state_dict()
    iterator = iter(ranks[1])
    list(itertools.islice(iterator, 2))
    later = ranks[1].state_dict()
    for states, message in [
        ([], "requires a state, got none"),
        ([{}], "must be a result of a loader's state_dict"),
        (two[:1], "the state of rank 1 of 2 is missing"),
        ([two[0], two[0]], "one from each rank .*rank 0 of 2, rank 0 of 2"),
        (mixed, r"after different steps, by rank \[2, 1\]"),
        ([two[0], states_after([2, 2], other, 2)[1]], "differ in built"),
        ([two[0], later], "differ in epoch"),
        ([two[0], ended], r"states \[1\] were saved between epochs and the others in the middle"),
    ]:
        with pytest.raises(ValueError, match=message):
            merge_states(states)


def test_state_without_the_shards_of_a_rank_is_rejected() -> None:
    dataset = Uneven([9] * 4)
    two = states_after([2, 2], dataset, 2)
    with pytest.raises(ValueError, match=r"is from rank 0 of 2.*merge_states\(\)"):
        loaders(dataset, 2)[1].load_state_dict(two[0])
    with pytest.raises(ValueError, match="this is rank 0 of 4"):
        loaders(dataset, 4)[0].load_state_dict(two[0])
    apart = DataLoader(dataset, batch_size=3, seeding="batch", shards=4)
    next(iter(apart))
    with pytest.raises(ValueError, match=r"without ranks=Ranks\(\.\.\.\)"):
        loaders(dataset, 2)[0].load_state_dict(apart.state_dict())
    with pytest.raises(ValueError, match="build the loader as it was"):
        apart.load_state_dict(merge_states(two))


class Pipe(IterDataPipe[int]):
    pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shards": None}, "got shards=None; pass shards=N"),
        ({"shards": 1}, "shards must be at least 2, one for each rank, got 1"),
        ({"global_batch_size": 4}, "give the batch_size of one rank"),
        ({"remainder": "pad"}, "whose samples cannot be read twice, got 'pad'"),
        ({"seeding": "worker"}, r"seeding must not be 'worker' with ranks=Ranks\("),
        ({"seeding": "sample"}, "whose samples have no positions in an order"),
        ({"in_order": False}, r"in_order must be True with ranks=Ranks\("),
        ({"in_order": 4}, "depend on the number of ranks, got 4; leave in_order out"),
        ({"dataset": Pipe()}, "does not support datapipes"),
    ],
)
def test_unshardable_stream_options_are_rejected(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"dataset": Uneven(LENGTHS), "shards": 6, **options}
    of_ranks = {
        name: arguments.pop(name) for name in ("global_batch_size", "remainder") if name in options
    }
    with pytest.raises(ValueError, match=message):
        DataLoader(**arguments, ranks=Ranks(0, 2, **of_ranks))


def test_seeding_batch_is_the_default_for_rank_streams() -> None:
    dataset = Uneven(LENGTHS)
    assert whole(loaders(dataset, 2, seeding="batch")) == whole(loaders(dataset, 2))


# Ranks that are processes


def run_job(folder: Path, world_size: int, cases: list[dict[str, Any]]) -> list[list[Any]]:
    """The output of each rank, a value for each case."""
    (folder / "cases.json").write_text(json.dumps(cases))
    job = GlooRanks(PROGRAM, folder, world_size, {})
    try:
        seconds_max = SECONDS_MAX + len(cases)
        ended = [job.finish(rank, seconds_max) for rank in range(world_size)]
        assert [code for code, _ in ended] == [0] * world_size, [text for _, text in ended]
        return [job.lines(rank) for rank in range(world_size)]
    finally:
        job.kill()


def check_case(case: dict[str, Any], by_rank: list[Any]) -> None:
    """All ranks took exactly the steps for which every one of them had a batch."""
    dataset = Uneven(case["lengths"])
    options = {
        name: value
        for name, value in case.get("options", {}).items()
        if name in ("batch_size", "drop_last")
    }
    alone = loaders(dataset, case["ranks"], **options)
    for epoch, count in enumerate(case["epochs"]):
        expected = whole(alone)
        step_count = min(len(batches) for batches in expected)
        is_left = count is not None and count <= step_count
        step_count = count if is_left else step_count
        for rank, batches in enumerate(expected):
            assert by_rank[rank]["epochs"][epoch] == batches[:step_count]
            if is_left:
                continue
            if case["ranks"] == 1:
                assert by_rank[rank]["ends"][epoch] is None
                continue
            steps, ended_rank, dropped_count, has_more = by_rank[rank]["ends"][epoch]
            assert steps == step_count == len(expected[ended_rank])
            unread_count = len(batches) - step_count - dropped_count
            assert unread_count >= 0 and (has_more or unread_count == 0)


def random_case(rng: random.Random, ranks_max: int) -> dict[str, Any]:
    world_size = rng.randrange(1, ranks_max + 1)
    shard_count = rng.randrange(world_size, 2 * world_size + 3)
    few = rng.choice([2, 9, 30])
    workers = rng.choice([0, 0, 0, 1, 2])
    is_persistent = workers > 0 and rng.random() < 0.5
    return {
        "ranks": world_size,
        "lengths": [rng.randrange(few + 1) for _ in range(shard_count)],
        "epochs": rng.choice([[None], [None, None], [1, None], [None, 2, None]]),
        "options": {
            "batch_size": rng.choice([1, 2, 5]),
            "drop_last": rng.random() < 0.3,
            "num_workers": workers,
            "persistent_workers": is_persistent,
            "prefetch_factor": rng.choice([1, 2, 4]) if workers else None,
        },
    }


# 1,000 cases of up to 8 ranks, in five tests, since one alone would take minutes.
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "count", "seed"),
    [(3, 25, 3), *((8, 200, seed) for seed in range(5))],
)
def test_real_ranks_take_the_same_steps(
    tmp_path: Path, world_size: int, count: int, seed: int
) -> None:
    rng = random.Random(seed)
    cases = [random_case(rng, world_size) for _ in range(count)]
    lines = [iter(of_rank) for of_rank in run_job(tmp_path, world_size, cases=cases)]
    for case in cases:
        check_case(case, [next(lines[rank]) for rank in range(case["ranks"])])


@pytest.mark.slow
def test_workers_with_untaken_batches_start_next_epoch(tmp_path: Path) -> None:
    # Each rank has one shard and two workers: as many batches are requested from the first worker
    # as from both. When the epoch ends, it does not have memory for them all.
    lengths = [4, 60]
    case = {
        "ranks": 2,
        "dataset": "Late",
        "lengths": lengths,
        "epochs": [None, None],
        "options": {
            "batch_size": 1,
            "num_workers": 2,
            "persistent_workers": True,
            "prefetch_factor": 4,
        },
    }
    by_rank = [done for (done,) in run_job(tmp_path, 2, [case])]
    for rank, done in enumerate(by_rank):
        assert done["epochs"] == [[[[rank, place]] for place in range(lengths[0])]] * 2
    assert all(end[3] for end in by_rank[1]["ends"]), "there is more that nobody takes"


@pytest.mark.long
@pytest.mark.slow
def test_stuck_rank_ends_its_epoch_with_the_others(tmp_path: Path) -> None:
    lengths = [6, 6]
    expected = whole(loaders(Uneven(lengths), 2, batch_size=1))
    step_count = len(expected[0])
    assert len(expected[1]) == step_count, "the second rank looks for one where the first has ended"
    case = {
        "ranks": 2,
        "dataset": "Stuck",
        "lengths": lengths,
        "epochs": [None],
        "options": {"batch_size": 1, "num_workers": 1},
    }
    by_rank = [done for (done,) in run_job(tmp_path, 2, [case])]
    assert [done["epochs"][0] for done in by_rank] == expected
    ends = [[step_count, 0, 0, False], [step_count, 0, 0, True]]
    assert [done["ends"][0] for done in by_rank] == ends


@pytest.mark.long
@pytest.mark.slow
def test_stopped_stream_job_resumes_with_other_rank_counts(tmp_path: Path) -> None:
    dataset = Uneven([20] * 6, kept=0.9)
    expected = by_shard(whole(loaders(dataset, 1, batch_size=2)))
    found: dict[int, list[Any]] = {}
    for world_size, count, workers in [(2, 3, 0), (3, 2, 1), (1, None, 2)]:
        case = {
            "ranks": world_size,
            "lengths": dataset.lengths,
            "epochs": [count],
            "options": {"batch_size": 2, "num_workers": workers},
            "saves": True,
        }
        lines = run_job(tmp_path, world_size, cases=[case])
        for shard, batches in by_shard([one[0]["epochs"][0] for one in lines]).items():
            found.setdefault(shard, []).extend(batches)
        for rank in range(world_size):
            (tmp_path / f"rank-{rank}").unlink()
    assert set(found) == set(expected)
    for shard, batches in found.items():
        assert batches == by_shard(whole(loaders(Uneven([20] * 6), 1, batch_size=2)))[shard]


@pytest.mark.slow
def test_ranks_with_a_pool_take_the_same_steps(tmp_path: Path, steady_pool: PoolProcesses) -> None:
    case = {
        "ranks": 2,
        "lengths": LENGTHS,
        "epochs": [None, None],
        "options": {"batch_size": 2, "pool": steady_pool.endpoint},
    }
    lines = run_job(tmp_path, 2, cases=[case])
    check_case(case, [of_rank[0] for of_rank in lines])
