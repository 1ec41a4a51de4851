# SPDX-License-Identifier: Apache-2.0
"""A rank of a job that packs documents by the loader for torchtitan, for tests.

    titan_job.py FOLDER '{"data": "data", "save_after": 3, "checkpoint": "saved"}'

Each rank appends the rows of each of its batches to FOLDER/rank-R. After "save_after" steps, the
job saves its loaders in "checkpoint".
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_torchtitan import rank_of, rows_of


def main() -> None:
    folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    loader = rank_of(
        importlib.import_module("titan_loader"),
        Path(given["data"]),
        dist.get_rank(),
        dist.get_world_size(),
        pack="split",
        repeat=False,
        num_workers=1,
    )
    with (folder / f"rank-{dist.get_rank()}").open("a", buffering=1) as file:
        for step, batch in enumerate(loader, 1):
            file.write(json.dumps(rows_of(batch)) + "\n")
            if step == given["save_after"]:
                dcp.save({"dataloader": loader}, checkpoint_id=given["checkpoint"])
    dist.barrier()
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
