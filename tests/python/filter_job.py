# SPDX-License-Identifier: Apache-2.0
"""A rank of a job that filters a dataset together with the others, for tests.

    filter_job.py FOLDER '{"state": "state.pt", "leave_after": 5}'

Each rank appends each of its batches, as a list, to FOLDER/rank-R, and to FOLDER/read-R the index
of each sample that it reads in the evaluation. A rank resumes from "state", if given, and saves its
state in FOLDER/state-R.pt after the step "leave_after". "cache" is a cache file. "fails" is a rank
that raises in an evaluation before; all ranks write their errors to FOLDER/error-R.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from penstock import DataLoader, RankError, Ranks, filtered

LENGTH, STEP_SIZE = 403, 12


class Numbers(Dataset[Any]):
    """Samples (index, draw)."""

    reads: Any = None  # file for the indices that are read

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        if self.reads is not None:
            self.reads.write(f"{index}\n")
        return index, int(torch.randint(1 << 30, ()))


def is_kept(sample: Any) -> bool:
    return bool(sample[0] % 7 in (0, 3, 4))


def refuse(sample: Any) -> bool:
    raise LookupError(f"no answer for {sample[0]}")


def make_loader(kept: Any, ranks: Ranks | None = None, **options: Any) -> Any:
    return DataLoader(
        kept,
        seeding="sample",
        ranks=ranks or Ranks(global_batch_size=STEP_SIZE),
        generator=torch.Generator().manual_seed(7),
        **{"shuffle": True, **options},
    )


def main() -> None:
    folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    numbers = Numbers()
    if "fails" in given:
        try:
            filtered(numbers, refuse if rank == given["fails"] else is_kept, ranks=Ranks())
        except (RankError, ValueError) as error:
            (folder / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
    with (folder / f"read-{rank}").open("w") as numbers.reads:
        kept = filtered(numbers, is_kept, ranks=Ranks(), cache=given.get("cache"))
    numbers.reads = None
    loader = make_loader(kept, num_workers=1)
    if "state" in given:
        loader.load_state_dict(torch.load(given["state"]))
    with (folder / f"rank-{rank}").open("a", buffering=1) as file:
        for step, (indices, draws) in enumerate(loader):
            file.write(json.dumps([indices.tolist(), draws.tolist()]) + "\n")
            if step == given.get("leave_after"):
                torch.save(loader.state_dict(), folder / f"state-{rank}.pt")
                break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
