# SPDX-License-Identifier: Apache-2.0
"""``DataLoader.reshard()``: another number of ranks between two steps, while workers stay.

The oracles are the order that one rank reads without an interruption, and loaders that are made at
the new size and resume from the state of the same step.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_processes import PoolProcesses, pool_of
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

import penstock
from penstock import DataLoader, MixtureSampler, Ranks, offload
from penstock.errors import ClosedError, UnsupportedError

STEP_SIZE, STEPS = 12, 9
HERE = Path(__file__).parent
SECONDS_MAX = 900


class Points(Dataset[torch.Tensor]):
    """Returns a sample's index and its augmentation."""

    def __len__(self) -> int:
        return STEP_SIZE * STEPS - 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(index)]), torch.rand(2)])


class Damaged(Points):
    """Every twentieth sample cannot be read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 20 == 5:
            raise LookupError(f"no sample {index}")
        return super().__getitem__(index)


class Scaled(torch.nn.Module):
    """A parameter that follows transforms without one, the same for any size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([0.5, 2.0, 3.0]))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(rows.abs() + 1).sin() * self.scale


class Shards(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        assert info is not None
        for number in range(7 + info.id % 2):
            yield torch.cat([torch.tensor([float(info.id), float(number)]), torch.rand(2)])


class Remembering(Points):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Twisted(Sampler[int]):
    """Another order each time, which it derives from no state that a loader could save."""

    def __init__(self) -> None:
        self.times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return iter(random.Random(self.times).sample(range(100), 100))

    def __len__(self) -> int:
        return 100


def make(rank: int, world_size: int, **options: Any) -> DataLoader[Any]:
    options = {"global_batch_size": STEP_SIZE, "remainder": "uneven", **options}
    names = ("global_batch_size", "remainder", "replica_group")
    ranks = Ranks(
        rank, world_size, **{name: options.pop(name) for name in names if name in options}
    )
    if "sampler" in options:
        options["sampler"] = options["sampler"]()
    else:
        options = {"shuffle": True, **options}
    return DataLoader(options.pop("dataset", Points()), ranks=ranks, **options)


def whole(epochs: int, **options: Any) -> list[list[torch.Tensor]]:
    loader = make(0, 1, **options)
    return [list(loader) for _ in range(epochs)]


class Job:
    """The ranks of one size, in one process and without a store, in which nothing is compared."""

    def __init__(self, world_size: int, **options: Any) -> None:
        self.options = options
        self.loaders = [make(rank, world_size, **options) for rank in range(world_size)]
        self.iterators = [iter(loader) for loader in self.loaders]

    def step(self) -> torch.Tensor:
        return torch.cat([next(iterator) for iterator in self.iterators])

    def commit(self) -> None:
        for loader in self.loaders:
            loader.commit(loader.batch_id())

    def reshard(self, world_size: int, state: dict[str, Any] | None = None) -> None:
        """The ranks that remain keep their order, ranks that leave close, and others join."""
        of_now = self.loaders[0].state_dict() if state is None else state
        pids = [self.pids(iterator) for iterator in self.iterators[:world_size]]
        for loader in self.loaders[world_size:]:
            loader.close()
        del self.loaders[world_size:], self.iterators[world_size:]
        for rank, loader in enumerate(self.loaders):
            loader.reshard(rank, world_size, state=state)
        if "shards" not in self.options:
            assert [self.pids(iterator) for iterator in self.iterators] == pids
        for rank in range(len(self.loaders), world_size):
            loader = make(rank, world_size, **self.options)
            loader.load_state_dict(of_now)
            loader.reshard(rank, world_size)
            self.loaders.append(loader)
            self.iterators.append(iter(loader))
        assert [one.rank for one in self.loaders] == [*range(world_size)]
        assert {one.world_size for one in self.loaders} == {world_size}

    @staticmethod
    def pids(iterator: Any) -> list[int]:
        return [worker.pid for worker in getattr(iterator, "_workers", ())]

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


def assert_equal(given: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert torch.equal(torch.cat(given), torch.cat(expected))


def mixture() -> MixtureSampler:
    lengths = [40, len(Points()) - 40]
    return MixtureSampler(lengths, [1, 2], when_exhausted="leave_out")


@pytest.mark.parametrize("order", ["shuffled", "mixture", "list"])
@pytest.mark.parametrize(
    "workers",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 1, "persistent_workers": True},
        {"num_workers": "auto"},
    ],
    ids=["none", "local", "persistent", "auto"],
)
@pytest.mark.long("local-shuffled", "local-list", "persistent-mixture", "auto-mixture", "auto-list")
def test_resharded_epochs_equal_those_of_one_rank(order: str, workers: dict[str, Any]) -> None:
    samplers: dict[str, Any] = {"mixture": mixture, "list": lambda: [*range(len(Points()))][::-1]}
    options = {"sampler": samplers[order]} if order in samplers else {}
    first, second = whole(2, **options)
    job = Job(2, **workers, **options)
    try:
        given = [job.step(), job.step()]
        for world_size, count in [(4, 2), (3, 0), (1, 1), (2, STEPS - 5)]:
            job.reshard(world_size)
            given += [job.step() for _ in range(count)]
        assert_equal(given, first)
        assert [next(iterator, None) for iterator in job.iterators] == [None, None]
        job.reshard(1)  # between two epochs
        pids = job.pids(job.iterators[0])
        iterator = iter(job.loaders[0])
        assert_equal([*iterator], second)
        assert job.pids(iterator) == pids or "persistent_workers" not in workers
    finally:
        job.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("commit", [None, "manual"])
def test_failing_samples_are_left_out_at_any_size(workers: int, commit: str | None) -> None:
    options: dict[str, Any] = {"dataset": Damaged(), "on_error": "skip"}
    (expected,) = whole(1, **options)
    job = Job(2, num_workers=workers, commit=commit, **options)
    try:
        given = []
        for world_size, count in [(3, 3), (1, 2), (2, STEPS - 5)]:
            for _ in range(count):
                given.append(job.step())
                if commit and len(given) != 3:
                    job.commit()
            job.reshard(world_size)
            if commit and len(given) == 3:  # its last step comes again, at the new size
                assert_equal([job.step()], given[2:])
                job.commit()
        assert_equal(given, expected)
        # A rank lists what it has left out itself.
        skipped = [one.index for loader in job.loaders for one in loader.skipped]
        assert {index % 20 for index in skipped} == {5}
    finally:
        job.close()


def test_cut_is_kept_at_another_size() -> None:
    model = Scaled()
    expected = [model(batch) for batches in whole(3) for batch in batches]
    job = Job(1, num_workers=1)
    (loader,) = job.loaders
    try:
        first = offload(Scaled(), loader, cut="maximal")
        given = [first(batch) for batch in job.iterators[0]]
        given += [first(batch) for batch in loader]
        assert loader.plan is not None and loader.plan.moved
        job.iterators = [iter(loader)]
        given += [first(job.step()) for _ in range(3)]
        job.reshard(2)
        models = [first, offload(Scaled(), job.loaders[1], cut="maximal")]
        before = loader.stats().boundary_batches
        for rows in zip(*job.iterators, strict=True):
            given += [one(batch) for one, batch in zip(models, rows, strict=True)]
        assert_equal(given, expected)
        assert loader.stats().boundary_batches == before + STEPS - 3
    finally:
        job.close()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("remainder", ["pad", "drop", "uneven"])
def test_resharded_ranks_equal_ranks_that_resume(workers: int, remainder: str) -> None:
    # A fixed size of a rank's batch, with which a step of another size has other samples.
    options = {"global_batch_size": None, "batch_size": 5, "remainder": remainder}
    job = Job(2, num_workers=workers, **options)
    try:
        for _ in range(3):
            job.step()
        state = job.loaders[1].state_dict()
        job.reshard(3)
        resumed = [make(rank, 3, **options) for rank in range(3)]
        for loader in resumed:
            loader.load_state_dict(state)
        others = [iter(loader) for loader in resumed]
        assert [len(loader) for loader in job.loaders] == [len(loader) for loader in resumed]
        for _ in range(2):
            for mine, other in zip(job.iterators, others, strict=True):
                assert torch.equal(next(mine), next(other))
        assert job.loaders[0].state_dict() == resumed[0].state_dict()
        for mine, other in zip(job.iterators, others, strict=True):
            assert_equal([*mine], [*other])
        assert_equal([*job.loaders[0]], [*resumed[0]])  # of the next epoch
    finally:
        job.close()


def test_random_sizes_deliver_each_sample_once(seed: int) -> None:
    rng = random.Random(seed)
    expected = whole(1)[0]
    for _ in range(12):
        job = Job(rng.randrange(1, 5))
        given = []
        while len(given) < STEPS:
            given += [job.step() for _ in range(min(rng.randrange(4), STEPS - len(given)))]
            job.reshard(rng.randrange(1, 5))
        assert_equal(given, expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_of_an_iterable_dataset_are_shared_out_again(workers: int) -> None:
    options = {
        "dataset": Shards(),
        "shards": 8,
        "batch_size": 2,
        "num_workers": workers,
        "global_batch_size": None,
        "shuffle": None,
    }

    def by_shard(batches: list[torch.Tensor]) -> dict[int, list[list[Any]]]:
        shards: dict[int, list[list[Any]]] = {}
        for batch in batches:
            shards.setdefault(int(batch[0, 0]), []).append(batch.tolist())
        return shards

    expected = by_shard(whole(1, **options)[0])
    job = Job(2, **options)
    try:
        given = [next(iterator) for _ in range(5) for iterator in job.iterators]
        with pytest.raises(ValueError, match=r"requires state= in the middle of an epoch of an it"):
            job.loaders[0].reshard(0, 4)
        for world_size, count in [(4, 2), (1, 3), (2, 99)]:
            job.reshard(
                world_size, penstock.merge_states([one.state_dict() for one in job.loaders])
            )
            for _ in range(count):
                given += [batch for one in job.iterators if (batch := next(one, None)) is not None]
        assert by_shard(given) == expected
    finally:
        job.close()


def test_pool_serves_resharded_ranks_over_the_same_connection(pool: PoolProcesses) -> None:
    pool.start_worker(processes=3)  # one for each rank
    first, second = whole(2)
    job = Job(2, pool=pool.endpoint)
    try:
        given = [job.step() for _ in range(3)]
        streams = [iterator._stream for iterator in job.iterators]  # type: ignore[attr-defined]
        job.reshard(3)
        given += [job.step() for _ in range(2)]
        job.reshard(2)
        now = [iterator._stream for iterator in job.iterators]  # type: ignore[attr-defined]
        assert all(one is other for one, other in zip(streams, now, strict=True))
        given += [job.step() for _ in range(STEPS - 5)]
        assert_equal(given, first)
        job.reshard(1)
        assert_equal([*job.loaders[0]], second)
    finally:
        job.close()


def test_earlier_state_repeats_steps_at_another_size() -> None:
    expected = whole(1)[0]
    job = Job(3, num_workers=1)
    try:
        given = [job.step() for _ in range(4)]
        state = job.loaders[0].state_dict()
        job.step()  # in which a rank dies
        job.reshard(2, state)
        assert_equal([*given, *(job.step() for _ in range(STEPS - 4))], expected)
    finally:
        job.close()


def test_numbers_change_before_the_first_epoch_and_after_a_state_is_loaded() -> None:
    expected = whole(1)[0]
    loaders = [make(rank, 2) for rank in range(2)]
    for rank, loader in enumerate(loaders):
        loader.reshard(1 - rank, 2)
    iterators = [iter(loader) for loader in reversed(loaders)]
    assert_equal([next(iterator) for iterator in iterators], expected[:1])
    state = loaders[0].state_dict()
    other = make(1, 2)
    other.load_state_dict(json.loads(json.dumps(state)))
    other.reshard(0, 1)
    assert_equal([*other], expected[1:])


def test_rank_and_world_size_default_to_those_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = make(0, 2)
    iterator = iter(loader)
    next(iterator)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    loader.reshard()
    assert (loader.rank, loader.world_size, loader.batch_size) == (2, 3, 4)
    assert len(next(iterator)) == 4


def refused(**options: Any) -> Any:
    return make(0, 2, **options)


@pytest.mark.parametrize(
    ("loader", "numbers", "error", "message"),
    [
        (lambda: DataLoader(torch.arange(9)), (0, 1), UnsupportedError, "requires ranks=Ranks"),
        (refused, (2, 2), ValueError, "0 <= rank < world_size, got rank=2 and world_size=2"),
        (refused, (0, None), ValueError, "rank and world_size must be passed together"),
        (
            lambda: refused(remainder="pad"),
            (0, 5),
            ValueError,
            "global_batch_size is 12 and there are 5 ranks",
        ),
        (lambda: refused(dataset=Remembering()), (0, 1), UnsupportedError, "with a state_dict"),
        (
            lambda: refused(sampler=Twisted),
            (0, 1),
            UnsupportedError,
            "requires a sampler that can be iterated from the place of a state, got Twisted",
        ),
        (
            lambda: refused(num_workers=1, in_order=False),
            (0, 1),
            UnsupportedError,
            "requires in_order=True",
        ),
        (
            lambda: make(
                0,
                2,
                dataset=Shards(),
                shards=2,
                shuffle=None,
                global_batch_size=None,
            ),
            (0, 3),
            ValueError,
            "shards must be at least 3, one for each rank, got 2",
        ),
    ],
)
def test_refused_numbers_change_nothing(
    loader: Any, numbers: tuple[Any, Any], error: type[Exception], message: str
) -> None:
    mine, twin = loader(), loader()
    iterators = [iter(mine), iter(twin)]
    assert torch.equal(*map(next, iterators))
    shown = repr(mine)
    with pytest.raises(error, match=message.replace("(", r"\(")):
        mine.reshard(*numbers)
    assert repr(mine) == shown
    batches = [[*iterator] for iterator in iterators]
    assert_equal(*batches)
    for one in (mine, twin):
        one.close()


def test_refused_states_change_nothing() -> None:
    job = Job(2)
    job.step()
    with pytest.raises(TypeError, match="state must be a dictionary"):
        job.loaders[0].reshard(0, 1, state=3)  # type: ignore[arg-type]
    other = make(0, 1, dataset=torch.arange(7))
    with pytest.raises(ValueError, match="is of a loader with dataset length 7"):
        job.loaders[0].reshard(0, 1, state=other.state_dict())
    assert_equal([job.step() for _ in range(STEPS - 1)], whole(1)[0][1:])


def test_failing_sampler_leaves_a_loader_that_goes_on_at_the_old_size() -> None:
    class Failing(MixtureSampler):
        fails = False

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if self.fails:
                raise OSError("no file of the sampler")
            super().load_state_dict(state)

    lengths = [40, len(Points()) - 40]
    sampler = Failing(lengths, [1, 2], when_exhausted="leave_out")
    loader = make(0, 2, sampler=lambda: sampler, num_workers=1)
    twin = make(0, 2, sampler=mixture)
    expected = [*twin]
    iterator = iter(loader)
    given = [next(iterator)]
    sampler.fails = True
    with pytest.raises(OSError, match="no file of the sampler"):
        loader.reshard(0, 1)
    sampler.fails = False
    assert (loader.rank, loader.world_size) == (0, 2)
    assert_equal([*given, *loader], expected)
    loader.close()


def test_prefetch_and_close_come_before_reshard() -> None:
    loader = make(0, 2, num_workers=1)
    loader.start_prefetch()
    with pytest.raises(UnsupportedError, match="start_prefetch"):
        loader.reshard(0, 1)
    assert next(iter(loader)) is not None
    loader.close()
    with pytest.raises(ClosedError):
        loader.reshard(0, 1)


def test_ranks_reshard_together_or_not_at_all(tmp_path: Path) -> None:
    command = [sys.executable, HERE / "reshard_errors.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(3)]
    expected = {
        "sizes": "the ranks reshard to different sizes: ",
        "same rank": "both call reshard() with rank=",
        "steps": "cannot reshard together: the first has samples given before ",
    }
    for case, text in expected.items():
        messages = {one["messages"][case] for one in ranks}
        assert len(messages) == 1, "all ranks have the same verdict"
        assert text in messages.pop()
    assert {"12", "24"} <= {*ranks[0]["messages"]["steps"].replace(";", "").split()}
    assert "s in reshard() for rank 2 of the new 3" in ranks[0]["messages"]["missing"]
    assert ranks[0]["messages"]["missing"] == ranks[1]["messages"]["missing"]
    assert ranks[0]["messages"]["missing"] == ranks[2]["messages"]["gave up"]
    assert "the other ranks have resharded without rank 2 of 3" in ranks[2]["messages"]["late"]
    given = sorted(itertools.chain.from_iterable(one["given"] for one in ranks))
    assert given == [*range(5 * STEP_SIZE)]


@pytest.mark.slow
@pytest.mark.long("100")
@pytest.mark.parametrize("count", [5, 100])
def test_random_sequences_of_real_ranks_deliver_each_sample_once(
    count: int, seed: int, tmp_path: Path
) -> None:
    program = HERE / "reshard_sequences.py"
    command = [sys.executable, program, tmp_path / "made", "--seed", str(seed)]
    command += ["--count", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
    sequences = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, [one for one in sequences if one["fault"]] or done.stderr
    assert len(sequences) == count
    if count > 10:
        assert sum(one["reshards_in_epoch"] for one in sequences) > count
        assert sum(one["kept_processes"] for one in sequences) > count / 4
        assert sum(one["joined"] for one in sequences) > count
