# SPDX-License-Identifier: Apache-2.0
"""The shards of an iterable dataset that one rank of a job reads."""

from __future__ import annotations

from typing import NamedTuple


class RankShards(NamedTuple):
    """Shard s of ``shard_count`` is read by rank ``s % world_size``. Picklable.

    A rank's stream counts its own shards from 0, and so do its workers' requests. All that a
    dataset sees, and the random numbers, follow from the number that a shard has in the job.
    """

    rank: int
    world_size: int
    shard_count: int  # of the job

    @property
    def ids(self) -> range:
        """The job's numbers of this rank's shards, in the order of the rank's own numbers."""
        return range(self.rank, self.shard_count, self.world_size)
