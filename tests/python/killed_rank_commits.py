# SPDX-License-Identifier: Apache-2.0
"""Gloo ranks that train asynchronously, are killed at random moments, and resume in other numbers.

Run as `python killed_rank_commits.py FOLDER KILLS SEED`. Each rank finishes its parts of the steps
in the order in which simulated rollouts end, whose lengths have a heavy tail, and commits them: the
ranks commit at different times. At random steps they merge their states into a checkpoint, with the
samples trained on so far: a step counts when all ranks have finished it. A rank is killed by a
signal after a random time, KILLS times; the job of the next life has another number of ranks.
Prints the samples trained on as JSON.
"""

from __future__ import annotations

import functools
import heapq
import json
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from torch.utils.data import Dataset

import penstock

COUNT, STEP_SIZE, EPOCHS, IN_FLIGHT, RANKS_MAX = 400, 6, 2, 12, 3
KILL_S_MIN, KILL_S_MAX = 0.1, 1.2


def length_of(sample: int) -> float:
    """Return the length of a sample's rollout, from a Pareto distribution of infinite variance."""
    return random.Random(sample).paretovariate(1.2)


class Prompts(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, int(torch.randint(1 << 30, ()))])


def make_loader(**options: Any) -> Any:
    ranks = penstock.Ranks(global_batch_size=STEP_SIZE, remainder="uneven")
    return penstock.DataLoader(Prompts(), shuffle=True, ranks=ranks, **options)


class Life:
    """One rank of one life of the job."""

    def __init__(self, checkpoint: Path, seed: int, rank: int) -> None:
        self.checkpoint = checkpoint
        self.common = random.Random(seed)  # the same on all ranks
        self.own = random.Random(f"{seed} {rank}")
        self.loader = make_loader(num_workers=1, commit="manual")
        self.epoch, self.now = 0, 0.0
        self.trained: dict[str, list[list[int]]] = {}  # by step, on all ranks
        self.done: dict[str, list[list[int]]] = {}  # by step, on this rank, in this life
        self.flying: list[Any] = []
        if checkpoint.exists():
            saved = json.loads(checkpoint.read_text())
            self.epoch, self.trained = saved["epoch"], saved["trained"]
            self.loader.load_state_dict(saved["loader"])

    def run(self) -> None:
        for epoch in range(self.epoch, EPOCHS):
            self.epoch = epoch
            self.train(self.loader)
            self.epoch = epoch + 1
            self.save()  # with the batches that are still in flight
        self.train(self.loader.redeliver())  # if a life before this one ended here
        self.land(0)
        self.save()

    def train(self, batches: Any) -> None:
        for batch in batches:
            takes = max(length_of(int(sample)) for sample in batch[:, 0])
            heapq.heappush(self.flying, (self.now + takes, self.own.random(), batch))
            self.land(self.own.randrange(IN_FLIGHT))
            if self.common.random() < 0.15:
                self.save()

    def land(self, most_left: int) -> None:
        while len(self.flying) > most_left:
            self.now, _, batch = heapq.heappop(self.flying)
            self.done[str(tuple(self.loader.batch_id(batch)))] = batch.tolist()
            self.loader.commit(batch)

    def save(self) -> None:
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, (self.loader.state_dict(), self.done))
        of_all = set.intersection(*(set(done) for _, done in states))
        for step in of_all:
            self.trained[step] = [row for _, done in states for row in done[step]]
        if dist.get_rank() > 0:
            return
        saved = {
            "epoch": self.epoch,
            "trained": self.trained,
            "loader": penstock.merge_states([state for state, _ in states]),
        }
        new = self.checkpoint.with_suffix(".new")
        new.write_text(json.dumps(saved))
        new.rename(self.checkpoint)


def live(rank: int, checkpoint: Path, seed: int, victim: int, kill_s: float) -> None:
    if rank == victim:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process at once
        signal.setitimer(signal.ITIMER_REAL, kill_s)
    torch.set_num_threads(1)
    Life(checkpoint, seed, rank).run()


def main(folder: Path, kills: int, seed: int) -> int:
    folder.mkdir()
    rng = random.Random(seed)
    checkpoint, log = folder / "checkpoint.json", folder / "log"
    died, sizes = 0, []
    whole: list[dict[str, list[list[int]]]] = []  # what jobs trained on that reached their ends
    while died < kills or checkpoint.exists() or not whole:
        world_size = rng.choice([one for one in range(1, RANKS_MAX + 1) if one not in sizes[-1:]])
        sizes.append(world_size)
        victim = rng.randrange(world_size) if died < kills else -1
        kill_s = rng.uniform(KILL_S_MIN, KILL_S_MAX)
        body = functools.partial(
            live, checkpoint=checkpoint, seed=rng.randrange(1 << 20), victim=victim, kill_s=kill_s
        )
        codes = run_ranks(world_size, body, log)
        is_killed = -signal.SIGALRM in codes
        if not is_killed and any(codes):
            print(f"the ranks ended with {codes}", log.read_text(), file=sys.stderr)
            return 1
        died += is_killed
        if not is_killed:
            whole.append(json.loads(checkpoint.read_text())["trained"])
            checkpoint.unlink()
    print(json.dumps({"died": died, "sizes": sizes, "whole": whole}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
