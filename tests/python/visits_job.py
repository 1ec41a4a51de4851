# SPDX-License-Identifier: Apache-2.0
"""A program that records the visits of its loader.

Run as `python visits_job.py FOLDER JSON`, with the options of the job as JSON. It prints the
samples of each batch after it has received it, and saves its loader's state now and then. With
"kills" in the options, it is run and killed as often.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from penstock import DataLoader, Ranks


class Numbers(Dataset[Any]):
    def __init__(self, count: int, version: str = "1") -> None:
        self.count = count
        self.version = version

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def make_loader(given: dict[str, Any]) -> Any:
    options = dict(given["loader"])
    if "ranks" in options:
        options["ranks"] = Ranks(**options["ranks"])
    generator = torch.Generator().manual_seed(given.get("seed", 5))
    return DataLoader(Numbers(given.get("count", 1000)), generator=generator, **options)


def main(folder: Path, given: dict[str, Any]) -> None:
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
    loader = make_loader(given)
    loader.record_visits(folder / given.get("visits", "visits"))
    state = folder / "state.pt"
    start = {"epoch": 0}
    if given.get("resumes") and state.exists():
        start = torch.load(state)
        loader.load_state_dict(start["loader"])
    steps = 0
    for epoch in range(start["epoch"], given.get("epochs", 2)):
        for batch in loader:
            print(json.dumps([epoch, batch.tolist()]), flush=True)
            steps += 1
            if steps == given.get("stop_after"):
                os._exit(0)
            if steps % given.get("save_every", 1 << 30) == 0:
                torch.save(
                    {"epoch": epoch, "loader": loader.state_dict()}, state.with_suffix(".new")
                )
                state.with_suffix(".new").rename(state)
            time.sleep(given.get("step_s", 0))
    loader.close()


def killed_lives(folder: Path, given: dict[str, Any]) -> None:
    """Run the program as forked processes, each with a folder of its own, and kill each at a random
    moment. Print the folder of its record, and the batches that it reported."""
    draw = random.Random(given.get("seed", 0))
    for life in range(given["kills"]):
        reads, writes = os.pipe()
        workers = draw.choice([0, 0, 2])
        of_life = {**given, "loader": {**given["loader"], "num_workers": workers}}
        visits = folder / f"life-{life}"
        pid = os.fork()
        if pid == 0:
            os.dup2(writes, 1)
            os.close(reads)
            main(visits, of_life)
        os.close(writes)
        with os.fdopen(reads) as pipe:
            lines = [pipe.readline() for _ in range(draw.randrange(1, 300))]
            time.sleep(draw.uniform(0, 0.02))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            lines += pipe.read().splitlines(keepends=True)
        batches = [json.loads(line)[1] for line in lines if line.endswith("\n")]
        print(json.dumps([str(visits / "visits"), batches]), flush=True)


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    run = killed_lives if "kills" in given else main
    run(Path(sys.argv[1]), given)
