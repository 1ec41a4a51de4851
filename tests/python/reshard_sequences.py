# SPDX-License-Identifier: Apache-2.0
"""Random lives of jobs of real gloo ranks that change their number while they read one epoch after
the other, without a restart: ranks join, leave and exchange their numbers.

    reshard_sequences.py FOLDER --seed 1 --count 100 --markdown

Every step has to be the step of one uninterrupted rank, with the same augmentation. Prints a line
of JSON for each sequence, or a table. The exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from rank_sequences import STEP_SIZE, Points, Row
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils.data import IterableDataset, get_worker_info

import penstock
from penstock import DataLoader, MixtureSampler, Ranks

PROCESSES = 4
SHARDS = 12  # divisible by 1, 2, 3 and 4 ranks


class Shards(IterableDataset[torch.Tensor]):
    """Yields a sample's shard, its number in it, and its augmentation. The shards are not equal."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        assert info is not None
        for number in range(6 + info.id % 3):
            yield torch.cat([torch.tensor([float(info.id), float(number)]), torch.rand(1)])


@dataclass(frozen=True)
class Phase:
    """Steps at one number of ranks."""

    processes: tuple[int, ...]  # by rank
    steps: int
    workers: int  # of the loaders that are made for it


@dataclass(frozen=True)
class Job:
    kind: str  # of the order: "shuffled", "mixture", "list" or "shards"
    count: int
    remainder: Any
    batch_size: int | None  # of a rank; None: the step has a fixed size
    has_one_group: bool  # of all processes, for the whole job; otherwise one for each size
    is_persistent: bool
    phases: tuple[Phase, ...]

    def loader(self, job: tuple[int, int], workers: int) -> Any:
        options: dict[str, Any] = {"shuffle": True}
        if self.kind == "mixture":
            lengths = [self.count // 3, self.count - self.count // 3]
            options = {"sampler": MixtureSampler(lengths, [1, 2], when_exhausted="leave_out")}
        elif self.kind == "list":
            options = {"sampler": random.Random(7).sample(range(self.count), self.count)}
        elif self.kind == "shards":
            options = {"shards": SHARDS}
        is_map = self.kind != "shards"
        return DataLoader(
            Points(self.count) if is_map else Shards(),
            batch_size=self.batch_size or 1,
            ranks=Ranks(
                *job,
                global_batch_size=STEP_SIZE if self.batch_size is None else None,
                remainder=self.remainder,
            ),
            num_workers=workers,
            persistent_workers=self.is_persistent and workers > 0,
            **options,
        )


@dataclass
class Sequence:
    """The result of a job."""

    kind: str
    sizes: list[int] = field(default_factory=list)
    steps: int = 0
    samples: int = 0
    padding: int = 0
    reshards_in_epoch: int = 0
    joined: int = 0
    kept_processes: int = 0  # workers that were there before and after a reshard
    restarted_processes: int = 0
    fault: str | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--markdown", action="store_true", help="print a table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    done = []
    for number in range(args.count):
        folder = args.folder / str(number)
        folder.mkdir(parents=True)
        done.append(run_sequence(random.Random(f"{args.seed} {number}"), folder))
        if not args.markdown:
            print(json.dumps(dataclasses.asdict(done[-1])), flush=True)
    if args.markdown:
        print(table(done))
    return int(any(sequence.fault for sequence in done))


def choose_job(rng: random.Random) -> Job:
    kind = rng.choice(["shuffled", "shuffled", "mixture", "list", "shards"])
    phases = []
    for _ in range(rng.randrange(3, 7)):
        size = rng.randrange(1, PROCESSES + 1)
        phases.append(
            Phase(
                tuple(rng.sample(range(PROCESSES), size)),
                rng.randrange(5),
                rng.choice([0, 0, 2]),
            )
        )
    has_fixed_step = kind != "shards" and rng.random() < 0.6
    return Job(
        kind=kind,
        count=rng.randrange(40, 150),
        remainder="drop" if kind == "shards" else rng.choice(["pad", "uneven", "drop"]),
        batch_size=None if has_fixed_step else rng.choice([1, 2, 3]),
        has_one_group=rng.random() < 0.5,
        is_persistent=rng.random() < 0.5,
        phases=tuple(with_survivors(phases)),
    )


def with_survivors(phases: list[Phase]) -> list[Phase]:
    """Return the phases, with a process of the one before in each."""
    checked = phases[:1]
    for phase in phases[1:]:
        if not set(phase.processes) & set(checked[-1].processes):
            others = (*checked[-1].processes[:1], *phase.processes[1:])
            phase = dataclasses.replace(phase, processes=others)
        checked.append(phase)
    return checked


def run_sequence(rng: random.Random, folder: Path) -> Sequence:
    job = choose_job(rng)
    sequence = Sequence(job.kind, [len(phase.processes) for phase in job.phases])
    log = folder / "log"
    codes = run_ranks(PROCESSES, functools.partial(run_process, job=job, folder=folder), log)
    if any(codes):
        sequence.fault = f"{job} ended with {codes}: {log.read_text()}"
        return sequence
    made = [json.loads(line) for path in folder.glob("made-*") for line in path.open()]
    for kept, gone, has_joined, is_in_epoch in made:
        sequence.kept_processes += kept
        sequence.restarted_processes += gone
        sequence.joined += has_joined
        sequence.reshards_in_epoch += is_in_epoch
    if job.kind == "shards":
        ends = [json.loads(line) for line in (folder / "ends").open()]
        check_shards(sequence, job, steps_of(folder), dict(ends))
    else:
        check_order(sequence, job, steps_of(folder))
    if sequence.fault is None and job.kind != "shards" and sequence.restarted_processes:
        sequence.fault = f"{sequence.restarted_processes} workers were restarted"
    return sequence


class Process:
    """One process of the job, which is a rank in some of the phases."""

    def __init__(self, number: int, job: Job, folder: Path) -> None:
        self.number, self.job, self.folder = number, job, folder
        self.store = _get_default_store()
        if not job.has_one_group:
            dist.barrier()  # all have connected
            dist.destroy_process_group()
        self.loader: Any = None
        self.iterator: Any = None
        self.step = 0  # of the job
        self.epoch = 0
        self.file = (folder / f"steps-{number}").open("w")

    def run(self) -> None:
        for number, phase in enumerate(self.job.phases):
            before = self.job.phases[number - 1] if number > 0 else None
            self.meet(number, phase, before)
            if self.number in phase.processes:
                is_last = number == len(self.job.phases) - 1
                self.read(None if is_last else phase.steps)
            if self.number in phase.processes and self.job.kind == "shards":
                self.save(number)
            self.wait(f"end {number}", len(phase.processes), self.number in phase.processes)
        if not self.job.has_one_group:
            if dist.is_initialized():
                dist.destroy_process_group()
            store = dist.PrefixStore("end", self.store)
            dist.init_process_group("gloo", store=store, rank=self.number, world_size=PROCESSES)

    def meet(self, number: int, phase: Phase, before: Phase | None) -> None:
        """Be the rank of a phase, if any."""
        rank = phase.processes.index(self.number) if self.number in phase.processes else None
        if not self.job.has_one_group:
            if dist.is_initialized():
                dist.destroy_process_group()
            if rank is not None:
                store = dist.PrefixStore(f"phase {number}", self.store)
                size = len(phase.processes)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        if rank is None:
            if self.loader is not None:
                self.loader.close()
            self.loader = self.iterator = None
            return
        size = len(phase.processes)
        if before is None:
            self.loader = self.job.loader((rank, size), phase.workers)
            return
        has_joined = self.loader is None
        if not has_joined and self.job.kind != "shards":
            survivor = next(one for one in before.processes if one in phase.processes)
            if survivor == self.number:
                self.put(f"state {number}", self.place())
        state = None
        if self.job.kind == "shards":
            places = [self.get(f"state {number - 1} {one}") for one in before.processes]
            self.step, self.epoch = max(places[0][0], self.step), places[0][1]
            state = penstock.merge_states([place[2] for place in places])
        if has_joined:
            if self.job.kind != "shards":
                self.step, self.epoch, state = self.get(f"state {number}")
            self.loader = self.job.loader((rank, size), phase.workers)
            self.loader.load_state_dict(state)
            state = None
        pids = self.pids()
        is_in_epoch = self.iterator is not None
        if self.job.has_one_group:
            self.loader.reshard(rank, size, state=state)
        else:
            self.loader.reshard(state=state)
        assert (self.loader.rank, self.loader.world_size) == (rank, size)
        kept = len(pids & self.pids())
        with (self.folder / f"made-{self.number}").open("a") as file:
            print(json.dumps([kept, len(pids) - kept, has_joined, is_in_epoch]), file=file)

    def read(self, steps: int | None) -> None:
        """Read some steps, or to the end of an epoch."""
        first = self.step
        while steps is None or self.step - first < steps:
            if self.iterator is None:
                self.iterator = iter(self.loader)
            batch = next(self.iterator, None)
            if batch is None:
                self.iterator = None
                with (self.folder / "ends").open("a") as file:
                    print(json.dumps([self.epoch, self.loader.world_size]), file=file)
                self.epoch += 1
                if steps is None:
                    return
                continue
            self.step += 1
            line = [self.step, self.epoch, self.loader.rank, self.loader.world_size, batch.tolist()]
            print(json.dumps(line), file=self.file, flush=True)

    def pids(self) -> set[int]:
        return {one.pid for one in getattr(self.iterator, "_workers", ())}

    def place(self) -> list[Any]:
        return [self.step, self.epoch, self.loader.state_dict()]

    def save(self, number: int) -> None:
        self.put(f"state {number} {self.number}", self.place())

    def put(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        return json.loads(self.store.get(key))

    def wait(self, key: str, count: int, counts: bool) -> None:
        """Wait until the ranks of a phase have reached this place."""
        if counts:
            self.store.add(key, 1)
        while self.store.add(key, 0) < count:
            time.sleep(0.002)


def run_process(number: int, job: Job, folder: Path) -> None:
    Process(number, job, folder).run()


def steps_of(folder: Path) -> dict[int, dict[int, Any]]:
    """Return the lines of each step by rank."""
    steps: dict[int, dict[int, Any]] = {}
    for path in folder.glob("steps-*"):
        for line in path.open():
            step, *rest = json.loads(line)
            ranks = steps.setdefault(step, {})
            assert rest[1] not in ranks, f"step {step} was taken twice"
            ranks[rest[1]] = rest
    return steps


def check_order(sequence: Sequence, job: Job, steps: dict[int, dict[int, Any]]) -> None:
    """Compare the steps with the order of one uninterrupted rank."""
    alone = dataclasses.replace(job, remainder="uneven", batch_size=1).loader((0, 1), 0)
    epochs: dict[int, list[list[Row]]] = {}
    for number in range(1, max(steps, default=0) + 1):
        ranks = steps[number]
        (epoch, _, size, _) = ranks[0]
        assert sorted(ranks) == [*range(size)], f"step {number} is of ranks {sorted(ranks)}"
        rows = [row for rank in range(size) for row in ranks[rank][3]]
        epochs.setdefault(epoch, []).append(rows)
        sequence.steps += 1
    for epoch in range(max(epochs, default=-1) + 1):
        expected = [row for batch in alone for row in batch.tolist()]
        given = epochs[epoch]
        last = given.pop()
        indices = [row[0] for row in last]
        own = [row for place, row in enumerate(last) if row[0] not in indices[:place]]
        rows = [row for step in given for row in step] + own
        sequence.samples += len(rows)
        sequence.padding += len(last) - len(own)
        rest = len(expected) - len(rows)
        step_size = STEP_SIZE if job.batch_size is None else job.batch_size * PROCESSES
        dropped = rest if job.remainder == "drop" and rest < step_size else 0
        if rows != expected[: len(expected) - dropped]:
            sequence.fault = f"{job}: epoch {epoch} has other samples than one rank's"
            return


def check_shards(
    sequence: Sequence, job: Job, steps: dict[int, dict[int, Any]], sizes: dict[int, int]
) -> None:
    """Compare the batches of each shard with the batches of one uninterrupted rank. ``sizes`` are
    the numbers of ranks at the end of each epoch, where one of them has no batch left."""
    alone = job.loader((0, 1), 0)
    given: dict[int, dict[int, list[Any]]] = {}
    for number in range(1, max(steps, default=0) + 1):
        ranks = steps[number]
        (epoch, _, size, _) = ranks[0]
        assert sorted(ranks) == [*range(size)], f"step {number} is of ranks {sorted(ranks)}"
        for rank in range(size):
            rows = ranks[rank][3]
            given.setdefault(epoch, {}).setdefault(int(rows[0][0]), []).append(rows)
            sequence.samples += len(rows)
        sequence.steps += 1
    for epoch, size in sorted(sizes.items()):
        expected: dict[int, list[Any]] = {}
        for batch in alone:
            expected.setdefault(int(batch[0, 0]), []).append(batch.tolist())
        left = [0] * size
        for shard, batches in expected.items():
            found = given[epoch].get(shard, [])
            left[shard % size] += len(batches) - len(found)
            if found != batches[: len(found)]:
                sequence.fault = f"{job}: epoch {epoch} has other batches of shard {shard}"
                return
        if min(left) > 0:
            sequence.fault = f"{job}: epoch {epoch} ends where the ranks have {left} batches left"


def table(sequences: list[Sequence]) -> str:
    total: dict[str, Counter[str]] = {}
    for one in sequences:
        for kind in (one.kind, "all"):
            counts = total.setdefault(kind, Counter())
            values = dataclasses.asdict(one)
            counts.update({name: values[name] for name in values if type(values[name]) is int})
            counts.update(sequences=1, faults=one.fault is not None)
    names = ["sequences", "faults", "steps", "samples", "padding", "reshards_in_epoch", "joined"]
    names += ["kept_processes", "restarted_processes"]
    lines = [f"| order | {' | '.join(names)} |", "| --- " * (len(names) + 1) + "|"]
    for kind, counts in sorted(total.items()):
        lines.append(f"| {kind} | {' | '.join(str(counts[name]) for name in names)} |")
    return "\n".join([*lines, *(f"FAULT {one.fault}" for one in sequences if one.fault)])


if __name__ == "__main__":
    sys.exit(main())
