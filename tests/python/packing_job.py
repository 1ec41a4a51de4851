# SPDX-License-Identifier: Apache-2.0
"""A rank of a job that packs documents, which are made once for all ranks, for tests.

    packing_job.py FOLDER '{"state": "state.pt", "leave_after": 5}'

Each rank appends the tokens of each of its batches to FOLDER/rank-R. Each document that is made
appends its index to FOLDER/made. A rank resumes from "state", if given, and saves its state in
FOLDER/state-R.pt after the step "leave_after".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock import DataLoader, Packer, Ranks

LENGTH = 200


class Made(torch.utils.data.Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.made = str(folder / "made")

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        with open(self.made, "a") as file:
            file.write(f"{index}\n")
        return torch.full((index % 37,), index)


def packer_of(folder: Path, replica_group: list[int] | None, **options: Any) -> Packer:
    ranks = None if replica_group is None else Ranks(replica_group=replica_group)
    loader = DataLoader(
        Made(folder),
        batch_size=16,
        collate_fn=list,
        shuffle=True,
        num_workers=0 if replica_group is None else 1,
        seeding="batch",
        ranks=ranks,
        generator=torch.Generator().manual_seed(1),
    )
    return Packer(loader, 64, batch_size=2, open_bins=8, **options)


def main() -> None:
    folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    packer = packer_of(folder, list(range(dist.get_world_size())))
    if "state" in given:
        packer.load_state_dict(torch.load(given["state"]))
    with (folder / f"rank-{rank}").open("a", buffering=1) as file:
        for step, batch in enumerate(packer):
            file.write(json.dumps(batch["tokens"].tolist()) + "\n")
            if step == given.get("leave_after"):
                torch.save(packer.state_dict(), folder / f"state-{rank}.pt")
                break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
