# SPDX-License-Identifier: Apache-2.0
"""Commits of ranks that share one order: a job of any number of ranks resumes with the steps that
were not committed, once, and with no others.

The oracle is the order that one rank reads without an interruption.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import killed_rank_commits
import pytest
import torch
import torch.distributed.checkpoint as dcp
from pool_processes import PoolProcesses, pool_of
from torch.utils.data import Dataset

import penstock
from penstock import BatchId, DataLoader, MixtureSampler, Ranks

PROGRAM = Path(__file__).with_name("killed_rank_commits.py")
SECONDS_MAX = 300
STEP_SIZE, STEPS, EPOCHS = 12, 9, 3
COUNT = STEP_SIZE * STEPS - 4
WORKERS: dict[str, dict[str, Any]] = {
    "in process": {},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 1, "persistent_workers": True},
    "any order": {"num_workers": 2, "in_order": False},
    "window": {"num_workers": 2, "in_order": 3},
}


class Points(Dataset[torch.Tensor]):
    """Returns a sample's index and its augmentation."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(index)]), torch.rand(2)])


def mixture() -> MixtureSampler:
    return MixtureSampler([40, COUNT - 40], [1, 2], when_exhausted="leave_out")


ORDERS: dict[str, dict[str, Any]] = {
    "shuffled": {"shuffle": True},
    "mixture": {"sampler": mixture},
    "list": {"sampler": lambda: [*range(COUNT)][::-1]},
    "sequential": {"shuffle": False},
    "owned": {"shuffle": True, "share": "by_cache"},
}


def make(rank: int, world_size: int, **options: Any) -> DataLoader[Any]:
    of_ranks = {"global_batch_size": STEP_SIZE, "remainder": "uneven"}
    for name in ("global_batch_size", "remainder", "share"):
        if name in options:
            of_ranks[name] = options.pop(name)
    options = {"commit": "manual", "shuffle": None, **options}
    if "sampler" in options:
        options["sampler"] = options["sampler"]()
    ranks = Ranks(rank, world_size, **of_ranks)  # type: ignore[arg-type]
    return DataLoader(Points(), ranks=ranks, **options)


def whole(epochs: int = EPOCHS, **options: Any) -> Counter[str]:
    """Return the samples of each step of an uninterrupted rank without commits."""
    loader = make(0, 1, **{**options, "commit": None})
    return Counter(
        key(BatchId(epoch, step), [batch])
        for epoch in range(epochs)
        for step, batch in enumerate(loader)
    )


def key(name: BatchId, parts: list[torch.Tensor]) -> str:
    """Return a step, however the ranks have divided it."""
    return str([tuple(name), sorted(torch.cat(parts).tolist())])


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(json.dumps(state))
    return loaded


class Job:
    """The ranks of one size, in one process and without a store: they do not compare their loaders.

    They are given steps, and finish them in random order, all of them alike.
    """

    def __init__(
        self, world_size: int, state: Any = None, epoch: int = 0, seed: int = 0, **options: Any
    ) -> None:
        self.options, self.epoch, self.rng = options, epoch, random.Random(seed)
        self.loaders = [make(rank, world_size, **options) for rank in range(world_size)]
        self.iterators: list[Any] | None = None
        self.flying: dict[BatchId, list[torch.Tensor]] = {}
        self.arrived: dict[BatchId, list[torch.Tensor]] = {}  # not on all ranks yet
        self.trained: Counter[str] = Counter()
        if state is not None:
            for loader in self.loaders:
                loader.load_state_dict(state)

    def step(self) -> None:
        """Have each rank take a batch; start the next epoch if there is none."""
        if self.iterators is None:
            self.iterators = [iter(loader) for loader in self.loaders]
        batches = [next(iterator, None) for iterator in self.iterators]
        if batches[0] is None:
            assert batches == [None] * len(batches)
            assert not self.arrived
            self.iterators = None
            self.epoch += 1
            return
        for loader, batch in zip(self.loaders, batches, strict=True):
            name = loader.batch_id()
            assert loader.batch_id(batch) == name
            parts = self.arrived.setdefault(name, [])
            parts.append(batch)
            if len(parts) == len(self.loaders):
                self.flying[name] = self.arrived.pop(name)

    def finish(self, most_left: int) -> None:
        while len(self.flying) > most_left:
            name = self.rng.choice([*self.flying])
            self.trained[key(name, self.flying.pop(name))] += 1
            for loader in self.loaders:
                loader.commit(name)

    def run(self, steps: int, in_flight: int = 5) -> None:
        while self.epoch < EPOCHS and steps > 0:
            self.step()
            self.finish(self.rng.randrange(in_flight + 1))
            steps -= 1

    def state(self) -> dict[str, Any]:
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        return through_json(states[0])

    def redeliver(self) -> None:
        """Finish the steps that are left when the last epoch is over."""
        for loader in self.loaders:
            for batch in loader.redeliver():
                self.flying.setdefault(loader.batch_id(), []).append(batch)
        self.finish(0)

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


def train(rng: random.Random, sizes: list[int], in_flight: int = 5, **options: Any) -> Counter[str]:
    """Return the steps that interrupted jobs of random sizes committed."""
    trained: Counter[str] = Counter()
    state, epoch = None, 0
    while epoch < EPOCHS:
        job = Job(rng.choice(sizes), state, epoch, rng.randrange(1 << 20), **options)
        try:
            job.run(rng.randrange(1, 2 * STEPS), in_flight)
            epoch, state = job.epoch, job.state()
            trained += job.trained
        finally:
            job.close()
    job = Job(rng.choice(sizes), state, epoch, **options)
    job.redeliver()
    assert all(loader.outstanding == () for loader in job.loaders)
    return trained + job.trained


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", WORKERS)
@pytest.mark.long(
    "workers-list", "workers-sequential", "workers-owned", "persistent-shuffled",
    "persistent-list", "persistent-sequential", "persistent-owned", "any order-mixture",
    "any order-list", "any order-sequential", "any order-owned", "window-mixture",
    "window-list", "window-sequential", "window-owned",
)  # fmt: skip
def test_each_step_is_committed_once_by_jobs_of_random_sizes(kind: str, order: str) -> None:
    options = {**WORKERS[kind], **ORDERS[order]}
    rng = random.Random(f"{kind} {order}")
    assert train(rng, [1, 2, 3, 4], **options) == whole(**ORDERS[order])


def test_random_jobs_in_process_commit_each_step_once(seed: int) -> None:
    rng = random.Random(seed)
    for order in ORDERS:
        assert train(rng, [1, 2, 3, 5], 9, **ORDERS[order]) == whole(**ORDERS[order])


def test_pool_serves_ranks_that_commit(pool: PoolProcesses) -> None:
    pool.start_worker(processes=3)  # one for each rank
    options = {"pool": pool.endpoint, "shuffle": True}
    first = Job(2, **options)
    first.run(STEPS + 4)
    second = Job(3, first.state(), first.epoch, **options)
    first.close()
    while second.epoch < 2:
        second.step()
    second.finish(0)
    second.close()
    assert first.trained + second.trained == whole(2, shuffle=True)


def test_flat_arguments_commit_too() -> None:
    def make_flat(rank: int, world_size: int, commit: str | None = "manual") -> Any:
        of_ranks = {"rank": rank, "world_size": world_size, "global_batch_size": STEP_SIZE}
        return DataLoader(Points(), shuffle=True, shard_by_rank=True, commit=commit, **of_ranks)

    expected = [*make_flat(0, 1, None)]
    loader = make_flat(1, 2)
    iterator = iter(loader)
    for step in range(4):
        next(iterator)
        if step != 1:
            loader.commit(loader.batch_id())
    other = make_flat(0, 1)
    other.load_state_dict(through_json(loader.state_dict()))
    assert [batch.tolist() for batch in other] == [
        expected[step].tolist() for step in (1, 4, 5, 6, 7, 8)
    ]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("remainder", ["pad", "drop", "uneven"])
def test_incomplete_last_step_is_divided_anew(remainder: str, workers: int) -> None:
    """Its samples are the samples that ranks of that number would have been given."""
    options = {"remainder": remainder, "num_workers": workers, "shuffle": True}
    steps = STEPS - (remainder == "drop")
    for between in (False, True):
        job = Job(2, **options)
        for _ in range(steps + between):
            job.step()
        names = [*job.flying]
        assert names == [(0, step) for step in range(steps)]
        for name in names[:-2]:
            for loader in job.loaders:
                loader.commit(name)
        state = job.state()
        job.close()
        for world_size in (3,) if workers else (1, 3, 4, 6):
            fresh = [[*make(rank, world_size, **options)] for rank in range(world_size)]
            resumed = [make(rank, world_size, **options) for rank in range(world_size)]
            for loader, expected in zip(resumed, fresh, strict=True):
                loader.load_state_dict(state)
                batches = [*itertools.islice(loader, 2)]
                assert str(batches) == str(expected[steps - 2 : steps])
                loader.close()


def test_size_of_a_step_may_change_with_the_number_of_ranks() -> None:
    """With a batch size per rank, steps that were given keep their samples."""
    options = {"global_batch_size": None, "batch_size": 6, "remainder": "drop", "shuffle": True}
    order = torch.cat([*make(0, 1, **{**options, "remainder": "pad"}, commit=None)]).tolist()
    for seed in range(30):
        rng = random.Random(seed)
        trained: list[list[float]] = []
        state: Any = None
        is_over = False
        while not is_over:
            job = Job(rng.randrange(1, 4), state, seed=rng.randrange(1 << 20), **options)
            for _ in range(rng.randrange(1, 12)):
                job.step()
                if job.epoch == 1:
                    break
                for name in rng.sample([*job.flying], rng.randrange(len(job.flying) + 1)):
                    trained += torch.cat(job.flying.pop(name)).tolist()
                    for loader in job.loaders:
                        loader.commit(name)
            is_over = job.epoch == 1
            state = job.state()
        last = Job(1, state, **options)
        if job.flying:
            trained += torch.cat(list(last.loaders[0].redeliver())).tolist()
        assert COUNT - len(trained) < 3 * 6
        assert sorted(trained) == sorted(order[: len(trained)]), seed


def test_step_that_ranks_cannot_divide_is_an_error() -> None:
    options = {"global_batch_size": None, "batch_size": 4, "remainder": "pad"}
    for between in (False, True):
        job = Job(2, **options)
        for _ in range(13 + between):
            job.step()
        for loader in job.loaders:
            for step in (0, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12):
                loader.commit(BatchId(0, step))
        state = job.state()
        message = r"an uncommitted step of 8 samples, which 3 ranks with remainder='pad' cannot"
        with pytest.raises(ValueError, match=message):
            make(0, 3, **options).load_state_dict(state)
        uneven = {**options, "remainder": "uneven"}
        rows = []
        for rank in range(3):
            loader = make(rank, 3, **uneven)
            loader.load_state_dict(state)
            rows.append([*itertools.islice(loader, 2)])
        expected = [*make(0, 1, **uneven, commit=None)]
        for number, step in enumerate((1, 5)):
            samples = torch.cat(expected[2 * step : 2 * step + 2])
            assert torch.equal(torch.cat([one[number] for one in rows]), samples)


def test_optimizers_of_ranks_commit() -> None:
    job = Job(2, commit="auto", shuffle=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    for number in range(7):
        job.step()
        if number % 3 == 2:
            optimizer.step()
    names = [(0, 6)]
    assert [tuple(one.outstanding) for one in job.loaders] == [tuple(map(tuple, (names)))] * 2
    resumed = make(0, 1, commit="auto", shuffle=True)
    resumed.load_state_dict(job.state())
    expected = [*make(0, 1, commit=None, shuffle=True)]
    assert str([*resumed]) == str(expected[6:])


# ---- Other numbers of ranks in a running job


@pytest.mark.parametrize("kind", ["in process", "workers", "any order"])
def test_resharded_ranks_are_given_uncommitted_steps_again(kind: str, seed: int) -> None:
    options = {**WORKERS[kind], "shuffle": True}
    rng = random.Random(seed)
    job = Job(2, **options)
    try:
        while job.epoch < EPOCHS:
            for _ in range(rng.randrange(4, 9)):
                if job.epoch < EPOCHS:
                    job.step()
                    job.finish(rng.randrange(6) if job.iterators is not None else 0)
            if job.iterators is not None and len({name.epoch for name in job.flying}) > 1:
                job.finish(0)
            _reshard(job, rng.randrange(1, 4))
        job.finish(0)
        assert job.trained == whole(shuffle=True)
    finally:
        job.close()


def _reshard(job: Job, world_size: int) -> None:
    """The ranks that remain keep their order, ranks that leave close, and others join."""
    for name in job.arrived:  # not on all ranks
        assert not job.loaders[0].state_dict()["_iterator_finished"], name
    job.arrived.clear()
    job.flying.clear()  # they come again
    state = job.loaders[0].state_dict()
    for loader in job.loaders[world_size:]:
        loader.close()
    del job.loaders[world_size:]
    for rank, loader in enumerate(job.loaders):
        loader.reshard(rank, world_size)
        assert loader.outstanding == ()
    for rank in range(len(job.loaders), world_size):
        loader = make(rank, world_size, **job.options)
        loader.load_state_dict(state)
        loader.reshard(rank, world_size)
        job.loaders.append(loader)
    if job.iterators is not None:
        del job.iterators[world_size:]
        job.iterators += [iter(loader) for loader in job.loaders[len(job.iterators) :]]


def test_batch_of_before_reshard_is_not_known() -> None:
    job = Job(2, shuffle=True)
    job.step()
    (name,) = job.flying
    batch = job.flying[name][0]
    job.loaders[0].reshard(0, 3)
    with pytest.raises(ValueError, match="was delivered before load_state_dict"):
        job.loaders[0].commit(batch)
    with pytest.raises(ValueError, match="must be a batch that was delivered, and not since"):
        job.loaders[0].commit(name)


def test_reshard_between_steps_needs_earlier_epochs_committed() -> None:
    job = Job(2, shuffle=True)
    for _ in range(STEPS + 3):
        job.step()
    assert job.epoch == 1
    with pytest.raises(ValueError, match=r"the steps of earlier epochs are committed, got 9 that"):
        job.loaders[0].reshard(0, 3)
    for loader in job.loaders:
        for step in range(STEPS):
            loader.commit(BatchId(0, step))
        loader.reshard(loader.rank, 2)


def test_reshard_while_earlier_epochs_are_repeated() -> None:
    expected = [*make(0, 1, shuffle=True, commit=None)]
    job = Job(2, shuffle=True)
    for _ in range(STEPS + 1):
        job.step()
    state = job.state()
    others = Job(2, state, shuffle=True)
    others.step()
    others.step()
    assert [*others.flying] == [(0, 0), (0, 1)]
    for loader in others.loaders:
        loader.commit(BatchId(0, 1))
    _reshard(others, 3)
    for _ in range(STEPS):
        others.step()
    assert [*others.flying] == [(0, step) for step in (0, 2, 3, 4, 5, 6, 7, 8)] + [(1, 0)]
    for name, parts in [*others.flying.items()][:-1]:
        assert torch.equal(torch.cat(parts), expected[name.batch])


# ---- States


def test_state_without_commit_resumes_with_commit_and_back() -> None:
    expected = [*make(0, 1, shuffle=True, commit=None)]
    plain = [make(rank, 2, shuffle=True, commit=None) for rank in range(2)]
    iterators = [iter(loader) for loader in plain]
    for iterator in iterators:
        for _ in range(3):
            next(iterator)
    state = through_json(plain[0].state_dict())
    assert state["version"] == 1
    job = Job(3, state, shuffle=True)
    for _ in range(4):
        job.step()
    assert [*job.flying] == [(0, step) for step in (3, 4, 5, 6)]
    for loader in job.loaders:
        loader.commit(BatchId(0, 5))
    state = job.state()
    assert state["version"] == 6
    back = [make(rank, 2, shuffle=True, commit=None) for rank in range(2)]
    given: list[Any] = []
    for loader in back:
        loader.load_state_dict(state)
        given.append([*itertools.islice(loader, 1)])
    for world_size in (2, 4):  # once more, in the middle of the steps that come again
        again = [make(rank, world_size, shuffle=True, commit=None) for rank in range(world_size)]
        parts = []
        for loader in again:
            loader.load_state_dict(through_json(back[0].state_dict()))
            parts.append([*loader])
        steps = [torch.cat(step) for step in zip(*parts, strict=True)]
        assert torch.equal(torch.cat([one[0] for one in given]), expected[3])
        assert str(steps) == str([expected[step] for step in (4, 6, 7, 8)])

    finished = Job(2, shuffle=True)
    for _ in range(STEPS + 1):
        finished.step()
    with pytest.raises(ValueError, match="1 earlier epochs that were delivered and not committed"):
        back[0].load_state_dict(finished.state())


def test_state_is_small() -> None:
    count, in_flight = 2048, 1024
    loader = DataLoader(
        torch.arange(8 * count), shuffle=True, ranks=Ranks(0, 2, global_batch_size=8),
        commit="manual",
    )  # fmt: skip
    iterator = iter(loader)
    for _ in range(count - 1):
        next(iterator)
    for step in range(1, count - 1):
        if step % 2:
            loader.commit(BatchId(0, step))
    assert len(loader.outstanding) == in_flight
    assert len(json.dumps(loader.state_dict())) < 10_000


@pytest.mark.parametrize("order", ["shuffled", "mixture"])
def test_state_has_the_same_keys_everywhere(order: str, tmp_path: Path) -> None:
    """As torch.distributed.checkpoint requires, which also keeps the commits."""
    options = ORDERS[order]
    plain, loader = make(0, 1, **options, commit=None), make(0, 1, **options)
    keys = {_keys(plain.state_dict()), _keys(loader.state_dict())}
    for epoch in range(2):
        for step, _ in enumerate(loader):
            if step % 3 == 1:
                loader.commit(loader.batch_id())
            keys.add(_keys(loader.state_dict()))
            if epoch == 1 and step == 4:
                break
    assert len(keys) == 1
    dcp.save({"loader": loader}, checkpoint_id=tmp_path / "with")
    other = make(0, 1, **options)
    dcp.load({"loader": other}, checkpoint_id=tmp_path / "with")
    assert other.state_dict() == loader.state_dict()
    expected = [*make(0, 1, **options, commit=None)]
    assert str([*itertools.islice(other, 6)]) == str([expected[at] for at in (0, 2, 3, 5, 6, 8)])
    dcp.save({"loader": plain}, checkpoint_id=tmp_path / "without")
    dcp.load({"loader": other}, checkpoint_id=tmp_path / "without")
    assert str([*other]) == str([*plain])


def _keys(value: Any, name: str = "") -> tuple[str, ...]:
    if not isinstance(value, dict):
        return (name,)
    return tuple(sorted(one for part in value for one in _keys(value[part], f"{name}.{part}")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runs": []}, r"\['runs'\] must be a list with the run of step 1"),
        ({"runs": [[2, 24, 12]]}, r"must be a list with the run of step 1"),
        ({"runs": [[1, 12, 0]]}, r"\['runs'\]\[0\]\[2\] must be an integer from 1 to"),
        ({"runs": [[1, 60, 12]]}, r"must be a run whose step 1 has samples from 0 on"),
        ({"runs": [[1, 40, 30]]}, r"\['samples'\] must be an integer of at least 70"),
        ({"missing": [1, 9]}, r"\['missing'\]\[1\] must be an integer from 2 to 3"),
        ({"through": None}, r"\['through'\] must be an integer"),
    ],
)
def test_changed_states_are_rejected(change: dict[str, Any], message: str) -> None:
    loader = make(0, 2, shuffle=True)
    for step, _ in enumerate(loader):
        if step != 1:
            loader.commit(loader.batch_id())
        if step == 3:
            break
    state = through_json(loader.state_dict())
    assert state["sampler"][1]["left"] == {"through": 4, "missing": [1], "runs": [[1, 12, 12]]}
    state["sampler"][1]["left"].update(change)
    with pytest.raises(ValueError, match=message):
        make(1, 2, shuffle=True).load_state_dict(state)


# ---- Ranks that commit at different times


@pytest.mark.parametrize("order", ["shuffled", "mixture"])
def test_merged_state_has_the_steps_that_all_ranks_committed(order: str, seed: int) -> None:
    options = ORDERS[order]
    expected = whole(**options)
    differed = 0
    for number in range(8):
        rng = random.Random(f"{seed} {number}")
        trained: Counter[str] = Counter()
        state, epoch = None, 0
        while epoch < EPOCHS:
            job = Job(rng.randrange(1, 5), state, epoch, rng.randrange(1 << 20), **options)
            own: list[set[BatchId]] = [set() for _ in job.loaders]
            given: dict[BatchId, list[torch.Tensor]] = {}
            for _ in range(rng.randrange(1, 14)):
                if job.epoch < EPOCHS:
                    job.step()
                given.update(job.flying)
                for done, loader in zip(own, job.loaders, strict=True):
                    for name in {*given} - done:
                        if rng.random() < 0.3:
                            loader.commit(name)
                            done.add(name)
            for name in given:
                if name in set.intersection(*own):
                    trained[key(name, given[name])] += 1
            states = [loader.state_dict() for loader in job.loaders]
            differed += any(one != states[0] for one in states)
            state = through_json(penstock.merge_states(states))
            epoch = job.epoch
            job.close()
        job = Job(2, state, epoch, **options)
        job.redeliver()
        assert trained + job.trained == expected
    assert differed > 0


def test_states_of_ranks_in_different_epochs_are_merged() -> None:
    """Rank 0 is in the next epoch, and has committed a step of it."""
    loaders = [make(rank, 2, shuffle=True) for rank in range(2)]
    iterators = [iter(loader) for loader in loaders]
    for iterator in iterators:
        for _ in range(STEPS):
            next(iterator)
    for step in (0, 3, 4):
        loaders[0].commit(BatchId(0, step))
    for step in (0, 3, 7):
        loaders[1].commit(BatchId(0, step))
    assert next(iterators[0], None) is None
    second = iter(loaders[0])
    next(second)
    loaders[0].commit(BatchId(1, 0))
    states = [loader.state_dict() for loader in loaders]
    assert states[0] != states[1]
    merged = penstock.merge_states(states)
    assert merged == penstock.merge_states(states[::-1])
    expected = [*make(0, 1, shuffle=True, commit=None)]
    job = make(0, 1, shuffle=True)
    job.load_state_dict(through_json(merged))
    assert str([*job]) == str([expected[step] for step in (1, 2, 4, 5, 6, 7, 8)])
    assert next(iterators[1], None) is None
    merged = penstock.merge_states([loader.state_dict() for loader in loaders])
    job.load_state_dict(merged)
    batches = [*job]
    assert str(batches[:7]) == str([expected[step] for step in (1, 2, 4, 5, 6, 7, 8)])
    assert len(batches) == 7 + STEPS


def test_states_of_other_jobs_are_not_merged() -> None:
    states = [make(0, 2, shuffle=shuffle).state_dict() for shuffle in (True, False)]
    with pytest.raises(ValueError, match="states 0 and 1 differ in built"):
        penstock.merge_states(states)
    plain = make(0, 2, shuffle=True, commit=None).state_dict()
    with pytest.raises(ValueError, match="and an iterable dataset, or with commit"):
        penstock.merge_states([states[0], plain])


# ---- Jobs of real ranks


def test_ranks_that_committed_other_steps_are_told(tmp_path: Path) -> None:
    command = [sys.executable, Path(__file__).with_name("differing_commits.py"), tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stderr
    of_ranks = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    for rank, found in enumerate(of_ranks):
        for message in (found["reshard"], found["iter"]):
            assert "uncommitted steps" in message
            assert "(0, 1) (1, SHA-256 " in message and "(0, 2) (1, SHA-256 " in message
        steps = [[4 * step + 2 * rank, 4 * step + 2 * rank + 1] for step in (1, 2, 4, 5)]
        assert found["left"] == steps
        assert found["outstanding"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, pytest.param(60, marks=pytest.mark.long)])
def test_killed_ranks_lose_and_repeat_no_sample(kills: int, tmp_path: Path) -> None:
    command = [sys.executable, PROGRAM, tmp_path / "job", str(kills), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX + 6 * kills)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["died"] == kills and len(set(report["sizes"])) > 1
    # The samples of each step are torch's, and their augmentation is as on one rank.
    generator = torch.Generator().manual_seed(0)
    of_torch = torch.utils.data.DataLoader(
        range(killed_rank_commits.COUNT),
        batch_size=killed_rank_commits.STEP_SIZE,
        shuffle=True,
        generator=generator,
    )
    loader = killed_rank_commits.make_loader()
    expected = {}
    for epoch in range(killed_rank_commits.EPOCHS):
        for step, (samples, batch) in enumerate(zip(of_torch, loader, strict=True)):
            assert torch.equal(samples, batch[:, 0])
            expected[str((epoch, step))] = batch.tolist()
    for trained in report["whole"]:
        assert trained == expected
