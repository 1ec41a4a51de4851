# SPDX-License-Identifier: Apache-2.0
"""Real gloo ranks whose calls of ``reshard()`` do not fit together.

    reshard_errors.py FOLDER

Each of 3 ranks writes to FOLDER/rank-R a JSON object: the message of each case's error by its name,
and all indices that it was given.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from forked_ranks import run_ranks
from rank_sequences import STEP_SIZE, Points

from penstock import DataLoader, Ranks
from penstock.errors import RankError
from penstock.ranks import job_store

RANKS = 3


def run_rank(rank: int, folder: Path) -> None:
    loader = DataLoader(
        Points(8 * STEP_SIZE), num_workers=1, ranks=Ranks(global_batch_size=STEP_SIZE)
    )
    messages: dict[str, str] = {}
    given: list[float] = []
    iterator = iter(loader)

    def take(count: int = 1) -> None:
        for _ in range(count):
            given.extend(row[0] for row in next(iterator).tolist())

    @contextlib.contextmanager
    def failing(case: str) -> Iterator[None]:
        try:
            yield
        except RankError as error:
            messages[case] = str(error)
        assert (loader.rank, loader.world_size) == (rank, RANKS)
        dist.barrier()

    take()
    with failing("sizes"):
        loader.reshard(rank, 2 if rank == 0 else RANKS)
    with failing("same rank"):
        loader.reshard(min(rank, 1), RANKS)
    if rank == 0:
        take()
    with failing("steps"):
        loader.reshard(rank, RANKS)
    if rank != 0:
        take()
    job_store.WAIT_S_MAX = 1.0
    with failing("missing"):
        if rank != 2:
            loader.reshard(rank, RANKS)
    with failing("gave up"):
        if rank == 2:
            loader.reshard(rank, RANKS)
    job_store.WAIT_S_MAX = 60.0
    take()
    if rank == 0:  # ranks 0 and 1 exchange their numbers, and rank 2 is left out
        loader.reshard(1, 2)
    elif rank == 1:
        loader.reshard(0, 2)
    dist.barrier()
    if rank == 2:
        with failing("late"):
            loader.reshard(0, 1)
    else:
        dist.barrier()
        take(2)
    (folder / f"rank-{rank}").write_text(json.dumps({"messages": messages, "given": given}))


if __name__ == "__main__":
    home = Path(sys.argv[1])
    codes = run_ranks(RANKS, lambda rank: run_rank(rank, home), home / "log")
    sys.stderr.write((home / "log").read_text())
    sys.exit(any(codes))
