# SPDX-License-Identifier: Apache-2.0
"""Random lives of jobs with ``ranks=Ranks()``: their ranks are killed at any step and resume from a
state at another number of ranks, without processes. Every sample is accounted for.

The oracle is the order of the job's epochs, read by one rank without an interruption.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from penstock import DataLoader, Ranks

RANKS_MAX = 8


class Indices(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


@dataclass
class Account:
    """The fate of the samples, by the number of ranks."""

    counts: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def table(self) -> str:
        names = ["lives", "kills", "resumes", "epochs ended", "steps", "given", "padded", "dropped"]
        rows = [["ranks", *names]]
        total: Counter[str] = Counter()
        for ranks, counts in sorted(self.counts.items()):
            rows.append([str(ranks), *(str(counts[name]) for name in names)])
            total += counts
        rows.append(["all", *(str(total[name]) for name in names)])
        return "\n".join(" ".join(f"{cell:>12}" for cell in row) for row in rows)


class Job:
    """One job, which is killed and resumed until its epochs are over."""

    def __init__(self, rng: random.Random, account: Account) -> None:
        self.rng, self.account = rng, account
        self.count = rng.randrange(1, 90)
        self.remainder = rng.choice(["pad", "drop", "uneven"])
        self.is_global = rng.random() < 0.5
        self.step_size = rng.choice([8, 12, 24, 60, rng.randrange(RANKS_MAX, 40)])
        self.shuffle = rng.random() < 0.8
        self.seed = rng.choice([None, rng.randrange(99)])
        self.epoch_count = rng.randrange(1, 4)
        (whole,) = self.loaders(1, batch_size=1)
        self.orders = [[int(batch) for batch in whole] for _ in range(self.epoch_count)]

    def loaders(
        self, world_size: int, batch_size: int = 1, global_batch_size: int | None = None
    ) -> list[Any]:
        def generator() -> Any:
            return None if self.seed is None else torch.Generator().manual_seed(self.seed)

        return [
            DataLoader(
                Indices(self.count),
                shuffle=self.shuffle,
                generator=generator(),
                batch_size=batch_size,
                ranks=Ranks(
                    rank,
                    world_size,
                    global_batch_size=global_batch_size,
                    remainder=self.remainder,  # type: ignore[arg-type]
                ),
            )
            for rank in range(world_size)
        ]

    def live(self) -> None:
        state: dict[str, Any] | None = None
        epoch, given_count = 0, 0
        while epoch < self.epoch_count:
            ranks = self.begin(state)
            if state is not None:
                self.note("resumes")
            steps_left = self.rng.choice([0, 1, self.rng.randrange(12), 1000])
            while steps_left >= 0 and epoch < self.epoch_count:
                iterators = [iter(one) for one in ranks]
                first_count = given_count
                is_over = False
                while steps_left > 0 and not is_over:
                    step = [next(iterator, None) for iterator in iterators]
                    is_over = step[0] is None
                    assert all((batch is None) == is_over for batch in step), "equal steps"
                    if not is_over:
                        steps_left -= 1
                        given_count += self.check_step(epoch, given_count, step)
                if not is_over:
                    break
                self.check_end(epoch, first_count, given_count)
                epoch, given_count = epoch + 1, 0
                if self.rng.random() < 0.3:
                    break
            if epoch < self.epoch_count:
                self.note("kills")
            states = [one.state_dict() for one in self.rng.sample(ranks, min(2, len(ranks)))]
            assert states[0] == states[-1], "the state is the job's"
            state = json.loads(json.dumps(states[0]))

    def begin(self, state: dict[str, Any] | None) -> list[Any]:
        sizes: dict[str, Any]
        if self.is_global:
            fitting = [
                ranks
                for ranks in range(1, RANKS_MAX + 1)
                if self.remainder == "uneven" or self.step_size % ranks == 0
            ]
            self.world_size = self.rng.choice(fitting)
            sizes = {"global_batch_size": self.step_size}
        else:
            self.world_size = self.rng.randrange(1, RANKS_MAX + 1)
            batch_size = self.rng.randrange(1, 6)
            self.step_size = batch_size * self.world_size
            sizes = {"batch_size": batch_size}
        self.note("lives")
        ranks = self.loaders(self.world_size, **sizes)
        for one in ranks:
            if state is not None:
                one.load_state_dict(state)
        return ranks

    def check_step(self, epoch: int, given_count: int, step: list[Any]) -> int:
        """Returns how many samples of the order the step contained."""
        batches = [batch.tolist() for batch in step]
        given = list(itertools.chain.from_iterable(batches))
        expected = self.orders[epoch][given_count : given_count + self.step_size]
        assert given[: len(expected)] == expected, "the step has the next samples of the order"
        padded = given[len(expected) :]
        is_even = len({len(batch) for batch in batches}) == 1
        if self.remainder == "uneven":
            assert max(map(len, batches)) - min(map(len, batches)) <= 1
            assert len(given) == max(len(expected), self.world_size)
        else:
            assert is_even
            assert len(given) == -(-len(expected) // self.world_size) * self.world_size
        assert set(padded) <= set(expected)
        assert self.remainder != "drop" or not padded
        self.note("steps")
        self.note("given", len(expected))
        self.note("padded", len(padded))
        return len(expected)

    def check_end(self, epoch: int, first_count: int, given_count: int) -> None:
        """``first_count`` were given before the start of this life, or of this epoch of it."""
        dropped = self.count - given_count
        left_out = (self.count - first_count) % self.step_size
        assert dropped == (left_out if self.remainder == "drop" else 0)
        self.note("dropped", dropped)
        self.note("epochs ended")

    def note(self, name: str, count: int = 1) -> None:
        self.account.counts[self.world_size][name] += count


@pytest.mark.slow
@pytest.mark.long("1000")
@pytest.mark.parametrize("sequence_count", [50, 1000])
def test_killed_jobs_read_each_sample_once(
    sequence_count: int, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    account = Account()
    samples = 0
    for number in range(sequence_count):
        job = Job(random.Random(f"{seed} {number}"), account)
        try:
            job.live()
        except Exception as error:
            raise AssertionError(f"in sequence {number}: {vars(job)}") from error
        samples += job.count * job.epoch_count
    with capsys.disabled():
        print(f"\n{sequence_count} jobs, {samples} samples\n{account.table()}")
    counts = sum(account.counts.values(), Counter())
    assert counts["given"] + counts["dropped"] == samples, "padding aside"


@pytest.mark.slow
@pytest.mark.long("1000")
@pytest.mark.parametrize("case_count", [50, 1000])
def test_ranks_have_equal_step_counts_for_uneven_datasets(case_count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(case_count):
        world_size = rng.randrange(2, 9)
        count = rng.randrange(1, 200)
        remainder: Any = rng.choice(["pad", "drop", "uneven"])
        size, whole = rng.randrange(1, 9), None
        step_size = size * world_size
        if rng.random() < 0.5:
            step_size += rng.randrange(world_size) if remainder == "uneven" else 0
            size, whole = 1, step_size
        ranks = [
            DataLoader(
                Indices(count),
                batch_size=size,
                shuffle=True,
                ranks=Ranks(rank, world_size, global_batch_size=whole, remainder=remainder),
            )
            for rank in range(world_size)
        ]
        given = [[batch.tolist() for batch in one] for one in ranks]
        assert {len(one) for one in given} == {len(ranks[0])}
        times = Counter(itertools.chain.from_iterable(itertools.chain.from_iterable(given)))
        padded = sum(times.values()) - len(times)
        dropped = count - len(times)
        left = count % step_size
        if remainder == "drop":
            assert (padded, dropped) == (0, left)
        elif remainder == "pad":
            assert (padded, dropped) == (-left % world_size, 0)
        else:
            assert (padded, dropped) == (max(0, world_size - left) if left else 0, 0)
