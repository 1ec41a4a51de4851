# SPDX-License-Identifier: Apache-2.0
"""A rank of a job over gloo that reads its shards of an iterable dataset, for tests.

    stream_job.py FOLDER

FOLDER/cases.json is a list such as [{"ranks": 2, "lengths": [3, 5], "epochs": [null]}]. Each case
is a loader for the first "ranks" ranks, which reads the "epochs" to their ends, or leaves each
after the given number of steps. "options" are passed to the loader. Each rank appends a line of
JSON per case to FOLDER/rank-R: the batches of each epoch, and how each ended. With "saves" the
first rank writes the merged state to FOLDER/job.json, from which a later run resumes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import shared_streams
import torch.distributed as dist

from penstock import DataLoader, Ranks, merge_states


def main() -> None:
    folder = Path(sys.argv[1])
    cases = json.loads((folder / "cases.json").read_text())
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for number, case in enumerate(cases):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # gives each case separate keys
        if rank < case["ranks"]:
            done = run(folder, rank, case)
            with (folder / f"rank-{rank}").open("a") as file:
                file.write(json.dumps(done) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def run(folder: Path, rank: int, case: dict[str, Any]) -> dict[str, Any]:
    dataset = getattr(shared_streams, case.get("dataset", "Uneven"))(case["lengths"])
    loader = DataLoader(
        dataset,
        ranks=Ranks(rank=rank, world_size=case["ranks"]),
        shards=len(case["lengths"]),
        **case.get("options", {}),
    )
    saved = folder / "job.json"
    if saved.exists():
        loader.load_state_dict(json.loads(saved.read_text()))
    epochs, ends = [], []
    for count in case["epochs"]:
        batches: list[Any] = []
        for batch in loader:
            batches.append(batch.tolist())
            if len(batches) == count:
                break
        end = loader.stats().epoch_end
        epochs.append(batches)
        ends.append(end and [end.step_count, end.ended_rank, end.dropped_batches, end.has_more])
    state = loader.state_dict()
    if case.get("saves"):
        states: list[Any] = [None] * case["ranks"]
        dist.all_gather_object(states, state)
        if rank == 0:
            saved.write_text(json.dumps(merge_states(states)))
    return {"epochs": epochs, "ends": ends}


if __name__ == "__main__":
    main()
