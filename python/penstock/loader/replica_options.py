# SPDX-License-Identifier: Apache-2.0
"""The values of ``replica_group``, and the loaders that can have one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from penstock.errors import UnsupportedError
from penstock.loader.loader_face import LoaderFace
from penstock.sampling.job_rank import JobRank
from penstock.seams.iterators import DatasetKind


def ranks_of(replica_group: Any) -> tuple[int, ...] | None:
    """The ranks that ``replica_group`` names, in ascending order.

    Raises ``TypeError`` or ``ValueError`` for what names no group that this process is in.
    """
    if replica_group is None:
        return None
    if isinstance(replica_group, Sequence) and not isinstance(replica_group, str):
        ranks = list(replica_group)
    else:
        group = getattr(replica_group, "get_group", lambda: replica_group)()
        if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
            raise TypeError(
                f"replica_group is {replica_group!r}; a process group, a device mesh of one "
                f"dimension or a list of ranks is expected"
            )
        ranks = dist.get_process_group_ranks(group)
    place = JobRank.of(None, None)
    known = range(place.world_size)
    if not all(isinstance(rank, int) and rank in known for rank in ranks) or len(set(ranks)) != len(
        ranks
    ):
        raise ValueError(
            f"replica_group is {ranks}; different ranks from 0 to {place.world_size - 1} are "
            f"expected"
        )
    if place.rank not in ranks:
        raise ValueError(
            f"replica_group is {ranks} and this process is rank {place.rank}; a rank names the "
            f"group that it is in"
        )
    return tuple(sorted(ranks))


def check_place(replica_group: tuple[int, ...] | None, rank: int | None) -> None:
    """Raises ``ValueError`` where ``shard_by_rank`` would count ranks in the place of groups."""
    if replica_group is not None and rank is None:
        raise ValueError(
            f"shard_by_rank and replica_group={list(replica_group)} were given without rank and "
            f"world_size; with a replica_group they count groups, so pass both, as in "
            f"rank=mesh.get_local_rank('dp'), world_size=mesh['dp'].size()"
        )


def check_replicable(loader: LoaderFace) -> None:
    """Raises ``UnsupportedError`` for a loader whose batches cannot be handed on."""
    if loader._dataset_kind != DatasetKind.Map:
        raise UnsupportedError(
            f"replica_group={loader.replica_group} was given and {type(loader.dataset).__name__} "
            f"is an IterableDataset, whose shards end when they end; only batches of a map-style "
            f"dataset can be handed on to other ranks: leave replica_group out"
        )


def speaks_for_group(loader: LoaderFace) -> bool:
    """Whether this rank compares its loader with those of other groups: the first of its own."""
    return loader.replica_group is None or loader.replica_group[0] == JobRank.of(None, None).rank
