# SPDX-License-Identifier: Apache-2.0
"""An asynchronous training loop that is killed at random moments, and resumed from its checkpoint.

Run as `python killed_commits.py FOLDER KILLS SEED`. Each life of the loop is a forked process. It
finishes batches in the order in which simulated rollouts end, whose lengths have a heavy tail,
commits them, and saves a checkpoint now and then: the loader's state and the samples trained on so
far, as a model's weights would hold them. The parent kills it with SIGKILL after a random time,
KILLS times, and lets the last life finish. Prints what was trained on as JSON.

`interrupted()` runs the same loop in this process, and `length_differences()` compares the lengths
of the samples trained on in the parts of a run. With a planted fault, which delays or loses the
batches in flight, of which more are long, the lengths differ.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from penstock import DataLoader

COUNT, EPOCHS, IN_FLIGHT = 600, 3, 24
WINDOW = COUNT // 2  # samples of a part of a run
CLASSES = (0.5, 0.9)  # quantiles between short, medium and long samples
# After a resume, the batches that were in flight come "first"; the others are planted faults.
Policy = Literal["first", "last", "lost"]


class Interrupted(Exception):
    """Stands for the death of the process."""


def length_of(sample: int) -> float:
    """Return the length of a sample's rollout, from a Pareto distribution of infinite variance."""
    return random.Random(sample).paretovariate(1.2)


class Prompts(Dataset[Any]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, int(torch.randint(1 << 30, ()))])


def make_loader(num_workers: int = 2) -> Any:
    return DataLoader(
        Prompts(),
        batch_size=2,
        shuffle=True,
        num_workers=num_workers,
        seeding="batch",
        generator=torch.Generator().manual_seed(3),
        commit="manual",
    )


def live(
    checkpoint: Path,
    seed: int,
    *,
    policy: Policy = "first",
    batches_max: int = -1,
    num_workers: int = 2,
    pause_s: float = 0.0002,
) -> None:
    """Train from the checkpoint to the end of the last epoch.

    Raises Interrupted after ``batches_max`` batches, unless it is negative.
    """
    rng = random.Random(seed)
    loader = make_loader(num_workers)
    epoch, trained, most_bytes, repeated_count = 0, [], 0, 0
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        epoch, trained, most_bytes = saved["epoch"], saved["trained"], saved["most_bytes"]
        repeated_count = saved["outstanding"]
        loader.load_state_dict(saved["loader"])
    flying: list[Any] = []
    now = 0.0

    def land() -> None:
        nonlocal now
        now, _, batch = heapq.heappop(flying)
        trained.extend(batch.tolist())
        loader.commit(batch)

    def save(epoch: int) -> None:
        nonlocal most_bytes
        state = loader.state_dict()
        if policy == "first":
            assert state["_iterator_finished"] or len(loader.outstanding) == len(flying)
        left = json.dumps([state.get("left"), state["commits"]])
        most_bytes = max(most_bytes, len(left))
        saved = {
            "epoch": epoch,
            "trained": trained,
            "loader": state,
            "outstanding": len(loader.outstanding),
            "most_bytes": most_bytes,
        }
        new = checkpoint.with_suffix(".new")
        new.write_text(json.dumps(saved))
        new.rename(checkpoint)

    def train(batches: Any, epoch: int) -> None:
        nonlocal batches_max
        for batch, at in by_policy(batches, epoch):
            if batches_max == 0:
                raise Interrupted
            batches_max -= 1
            takes = max(length_of(int(sample)) for sample in batch[:, 0])
            heapq.heappush(flying, (now + takes, rng.random(), batch))
            if len(flying) >= IN_FLIGHT:
                land()
            if rng.random() < 0.05:
                save(at)
            time.sleep(pause_s)

    def by_policy(batches: Any, epoch: int) -> Any:
        nonlocal repeated_count
        late = []
        for batch in batches:
            is_repeated, repeated_count = repeated_count > 0, repeated_count - 1
            if policy == "first" or not is_repeated:
                yield batch, epoch
            elif policy == "last":
                late.append(batch)
            else:
                loader.commit(batch)
        yield from ((batch, min(epoch + 1, EPOCHS)) for batch in late)  # the epoch is over

    for at in range(epoch, EPOCHS):
        train(loader, at)
        save(at + 1)  # with the batches that are still in flight
    train(loader.redeliver(), EPOCHS)  # if a life before this one ended here
    while flying:
        land()
    save(EPOCHS)


def interrupted(
    folder: Path, seed: int, batches_mean: int | None, policy: Policy = "first"
) -> list[list[int]]:
    """Return what a loop has trained on that was interrupted after random numbers of batches."""
    rng = random.Random(seed)
    checkpoint = folder / f"{policy}-{seed}-{batches_mean}.json"
    while True:
        batches_max = -1 if batches_mean is None else int(rng.expovariate(1 / batches_mean))
        try:
            live(
                checkpoint,
                rng.randrange(1 << 30),
                policy=policy,
                batches_max=batches_max,
                num_workers=0,
                pause_s=0,
            )
        except Interrupted:
            continue
        trained: list[list[int]] = json.loads(checkpoint.read_text())["trained"]
        return trained


def length_counts(trained: list[list[int]]) -> np.ndarray[Any, Any]:
    """Return the numbers of short, medium and long samples in each part of a run."""
    edges = np.quantile([length_of(sample) for sample in range(COUNT)], CLASSES)
    classes = np.digitize([length_of(sample) for sample, _ in trained], edges)
    starts = range(0, COUNT * EPOCHS, WINDOW)
    return np.array(
        [np.bincount(classes[at : at + WINDOW], minlength=len(CLASSES) + 1) for at in starts]
    )


def length_differences(trained: list[list[int]], reference: list[list[int]]) -> list[float]:
    """Return the chi-squared statistic of each part of a run, between two runs.

    Each has ``len(CLASSES)`` degrees of freedom, if the runs differ by chance.
    """
    mine, others = length_counts(trained), length_counts(reference)
    found: list[float] = ((mine - others) ** 2 / np.maximum(mine + others, 1)).sum(1).tolist()
    return found


def main(folder: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    checkpoint = folder / "checkpoint.json"
    died = 0
    while True:
        pid = os.fork()
        if pid == 0:
            live(checkpoint, rng.randrange(1 << 30))
            os._exit(0)
        if died < kills:
            time.sleep(rng.uniform(0.02, 0.4))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        rng.random()
        if os.WIFSIGNALED(status):
            died += 1
            continue
        if os.waitstatus_to_exitcode(status) != 0:
            sys.exit("the training loop failed")
        saved = json.loads(checkpoint.read_text())
        if died >= kills:
            print(
                json.dumps(
                    {"died": died, "trained": saved["trained"], "bytes": saved["most_bytes"]}
                )
            )
            return
        checkpoint.unlink()  # it reached its end between two kills, and starts anew
        assert_whole(saved["trained"])


def assert_whole(trained: list[list[int]]) -> None:
    """Check that each sample was trained on once an epoch: none lost, none doubled."""
    counts: dict[int, int] = {}
    for sample, _ in trained:
        counts[sample] = counts.get(sample, 0) + 1
    assert counts == dict.fromkeys(range(COUNT), EPOCHS), "samples were lost or doubled"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
