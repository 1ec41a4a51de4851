# SPDX-License-Identifier: Apache-2.0
"""A rank of a job in which ranks share batches, for tests.

    replica_job.py FOLDER '{"groups": [[0, 1], [2, 3]], "pool": "tcp://127.0.0.1:7000"}'

Each rank appends a line of JSON per step to FOLDER/rank-R: the epoch, the indices and a digest of
the batch. Each sample that is made appends its index to FOLDER/made. "workers" are the leader's
local workers. "epochs" are the numbers of steps after which each epoch is left. "fail" is an index
whose sample raises, and with "on_error" the last lines are the skipped samples. With "keep", the
batches are committed, except for these places among all that were delivered, and FOLDER/state-R is
the rank's state at the end. Other keys are explained where they are read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock import DataLoader, Ranks
from penstock.ranks import job_store

LENGTH, BATCH_SIZE = 96, 4


class Noisy(torch.utils.data.Dataset[Any]):
    def __init__(self, folder: Path, given: dict[str, Any]) -> None:
        self.made = str(folder / "made")
        self.fail: int | None = given.get("fail")
        self.value_count: int = given.get("values", 16)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        with open(self.made, "a") as file:
            file.write(f"{index}\n")
        if index == self.fail:
            raise KeyError(f"sample {index} is broken")
        return {"index": index, "x": torch.rand(self.value_count), "name": f"sample {index}"}


def digest(batch: Any) -> str:
    return hashlib.sha256(batch["x"].numpy().tobytes() + str(batch["name"]).encode()).hexdigest()


def loader_of(
    folder: Path, given: dict[str, Any], group: int, ranks: list[int] | None
) -> DataLoader[Any]:
    return DataLoader(
        Noisy(folder, given),
        BATCH_SIZE,
        shuffle=True,
        num_workers=given.get("workers", 0),
        ranks=Ranks(rank=group, world_size=len(given["groups"]), replica_group=ranks),
        pool=given.get("pool"),
        on_error=given.get("on_error", "raise"),
        commit="manual" if "keep" in given else None,
    )


def main() -> None:
    folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    job_store.WAIT_S_MAX = given.get("wait_s", job_store.WAIT_S_MAX)
    group, ranks = next((n, each) for n, each in enumerate(given["groups"]) if rank in each)
    loader = loader_of(folder, given, group, ranks)
    if given.get("absent") == rank:
        time.sleep(1000)
    if rank in given.get("other_seed", []):
        loader.generator.manual_seed(7)
    delivered = itertools.count()
    with (folder / f"rank-{rank}").open("a", buffering=1) as file:
        for epoch, steps in enumerate(given.get("epochs", [None, None])):
            if "state" in given and epoch == 0:
                loader.load_state_dict(given["state"])
            if "states" in given and epoch == 0:  # a state for each rank
                loader.load_state_dict(given["states"][rank])
            if [rank, epoch] == given.get("reseed"):  # only this rank reads another order from here
                loader.generator.manual_seed(3)
            for step, batch in enumerate(loader):
                if [rank, epoch, step] == given.get("kill"):
                    os.kill(os.getpid(), signal.SIGKILL)
                line = [epoch, batch["index"].tolist(), digest(batch)]
                batch["x"].zero_()  # other ranks must not see this change
                file.write(json.dumps(line) + "\n")
                if "keep" in given and next(delivered) not in given["keep"]:
                    loader.commit(loader.batch_id())
                if step + 1 == steps:
                    break
        if "keep" in given:
            (folder / f"state-{rank}").write_text(json.dumps(loader.state_dict()))
        for sample in loader.skipped:
            file.write(json.dumps([sample.index, sample.batch, sample.times]) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
