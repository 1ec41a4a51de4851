# SPDX-License-Identifier: Apache-2.0
"""Two gloo ranks that have committed other steps.

    differing_commits.py FOLDER

Each writes to FOLDER/rank-R a JSON object: the messages of the errors when it loads its own state
in a new loader, and when it reshards; and the samples that are left of the merged state.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import run_ranks

import penstock
from penstock.errors import RankError


def make_loader() -> Any:
    ranks = penstock.Ranks(global_batch_size=4)
    return penstock.DataLoader(torch.arange(24), num_workers=1, ranks=ranks, commit="manual")


def run_rank(rank: int, folder: Path) -> None:
    loader = make_loader()
    batches = iter(loader)
    for step in range(4):
        next(batches)
        if step != rank + 1:
            loader.commit(loader.batch_id())
    state = loader.state_dict()
    found: dict[str, Any] = {}
    try:
        loader.reshard(1 - rank, 2)
    except RankError as error:
        found["reshard"] = str(error)
    dist.barrier()
    other = make_loader()
    other.load_state_dict(state)
    try:
        next(iter(other))
    except RankError as error:
        found["iter"] = str(error)
    dist.barrier()
    states: list[Any] = [None] * 2
    dist.all_gather_object(states, state)
    merged = make_loader()
    merged.load_state_dict(penstock.merge_states(states))
    found["left"] = [batch.tolist() for batch in merged]
    loader.commit(next(iter(loader.outstanding)))  # it has continued at its old size
    found["outstanding"] = len(loader.outstanding)
    (folder / f"rank-{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    ended = run_ranks(2, functools.partial(run_rank, folder=place), place / "log")
    print((place / "log").read_text(), file=sys.stderr)
    sys.exit(any(ended))
