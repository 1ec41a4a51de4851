# SPDX-License-Identifier: Apache-2.0
"""Which rank of how many this process is."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch.distributed as dist


class JobRank(NamedTuple):
    """One of the processes that train one model together, counted from 0."""

    rank: int
    world_size: int

    @staticmethod
    def of(rank: int | None, world_size: int | None) -> JobRank:
        """The rank that the caller names, or that of this process.

        The process is asked for it in this order: its default process group, the variables RANK and
        WORLD_SIZE that torchrun sets, and it is the only one otherwise. Raises ``ValueError`` if
        one number is given without the other, or the two make no rank.
        """
        if (rank is None) != (world_size is None):
            raise ValueError(
                f"rank is {rank} and world_size is {world_size}; give both, or neither to have "
                f"those of this process"
            )
        if rank is None or world_size is None:
            rank, world_size = _of_this_process()
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank is {rank} and world_size is {world_size}; a rank from 0 to world_size - 1 "
                f"is expected"
            )
        return JobRank(rank, world_size)


def _of_this_process() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or world_size is None:
        return 0, 1
    try:
        return int(rank), int(world_size)
    except ValueError:
        raise ValueError(
            f"the environment has RANK={rank!r} and WORLD_SIZE={world_size!r}; two integers are "
            f"expected, as torchrun sets them"
        ) from None
