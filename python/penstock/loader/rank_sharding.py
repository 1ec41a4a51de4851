# SPDX-License-Identifier: Apache-2.0
"""``shard_by_rank``: the loader shares the samples of one order out over the ranks of a job."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import DistributedSampler, IterableDataset, IterDataPipe, MapDataPipe

from penstock.sampling.job_rank import JobRank
from penstock.sampling.rank_batch_sampler import RankBatchSampler, Remainder

_REMAINDERS = ("pad", "drop", "uneven")


class RankSharding(NamedTuple):
    """What a loader's arguments say about ranks, checked."""

    job: JobRank
    step_size: int  # samples of a step, over all ranks
    batch_size: int  # of this rank, to torch's constructor
    remainder: Remainder
    is_stream: bool = False  # the ranks share out shards, and not the samples of an order

    @staticmethod
    def of(arguments: dict[str, Any]) -> RankSharding:
        """The sharding that a loader's arguments ask for. Raises ValueError where they cannot be
        had."""
        dataset, sampler = arguments["dataset"], arguments["sampler"]
        if isinstance(dataset, (IterDataPipe, MapDataPipe)):
            raise ValueError(
                "shard_by_rank is True and the dataset is a datapipe, which torch's own iterator "
                "reads; use a map-style or an iterable dataset"
            )
        if isinstance(dataset, IterableDataset):
            return _of_stream(arguments)
        if arguments["batch_sampler"] is not None or arguments["batch_size"] is None:
            raise ValueError(
                "shard_by_rank is True and the batches are not the loader's to make: batch_sampler "
                "was given, or batch_size is None; give batch_size, or global_batch_size, and, for "
                "an order of your own, sampler"
            )
        if isinstance(sampler, DistributedSampler):
            raise ValueError(
                "shard_by_rank is True and sampler is a DistributedSampler, which shares the "
                "samples out already; leave one of the two out"
            )
        job = JobRank.of(arguments["rank"], arguments["world_size"])
        step_size, batch_size = _sizes(arguments, job.world_size)
        remainder = arguments["remainder"]
        if remainder is None:
            remainder = "drop" if arguments["drop_last"] else "pad"
        if remainder not in _REMAINDERS:
            raise ValueError(
                f"remainder is {remainder!r}; one of {', '.join(map(repr, _REMAINDERS))} is "
                f"expected"
            )
        if step_size % job.world_size and remainder != "uneven":
            raise ValueError(
                f"global_batch_size is {step_size} and there are {job.world_size} ranks, so that "
                f"their batches cannot be of one size; choose a multiple of {job.world_size}, or "
                f"pass remainder='uneven' to have some ranks get one sample more than others"
            )
        return RankSharding(job, step_size, batch_size, cast(Remainder, remainder))

    def batch_sampler(self, sampler: Any) -> RankBatchSampler:
        """The part of this rank in the order of ``sampler``. Raises ValueError if it has no
        length, by which all ranks know how many steps there are."""
        try:
            len(sampler)
        except TypeError:
            raise ValueError(
                f"shard_by_rank is True and the {type(sampler).__name__} has no length, so the "
                f"ranks cannot know how many steps an epoch has; give it a __len__"
            ) from None
        return RankBatchSampler(sampler, self.job, self.step_size, self.remainder)


def check_without_sharding(arguments: dict[str, Any]) -> None:
    """Refuses options that mean something with ``shard_by_rank`` alone. Raises ValueError."""
    for name in ("rank", "world_size", "global_batch_size", "remainder"):
        if arguments[name] is not None:
            raise ValueError(
                f"{name}={arguments[name]!r} was given without shard_by_rank=True, where each "
                f"rank's loader is its own; pass shard_by_rank=True, or leave {name} out"
            )


def _of_stream(arguments: dict[str, Any]) -> RankSharding:
    """Of an iterable dataset. Its shards are checked with the loader's other options."""
    if arguments["global_batch_size"] is not None:
        raise ValueError(
            f"global_batch_size is {arguments['global_batch_size']!r} and the dataset is the "
            f"IterableDataset {type(arguments['dataset']).__name__}, whose batches are each of one "
            f"shard and the same for any number of ranks; give batch_size, that of one rank"
        )
    remainder = "drop" if arguments["remainder"] is None else arguments["remainder"]
    if remainder not in ("drop", "uneven"):
        raise ValueError(
            f"remainder is {remainder!r} and the dataset is the IterableDataset "
            f"{type(arguments['dataset']).__name__}, of which no sample can be read a second time; "
            f"'drop' (all ranks end before the first step that one of them has no batch for) or "
            f"'uneven' (each ends by itself) is expected"
        )
    job = JobRank.of(arguments["rank"], arguments["world_size"])
    return RankSharding(job, 0, arguments["batch_size"], cast(Remainder, remainder), is_stream=True)


def order_generator() -> torch.Generator:
    """The generator of an order for which the program gives none: the same on all ranks."""
    return torch.Generator().manual_seed(0)


def _sizes(arguments: dict[str, Any], world_size: int) -> tuple[int, int]:
    """The samples of a step, and of one rank's batch."""
    batch_size, global_batch_size = arguments["batch_size"], arguments["global_batch_size"]
    if global_batch_size is None:
        return batch_size * world_size, batch_size
    if type(global_batch_size) is not int or global_batch_size < world_size:
        raise ValueError(
            f"global_batch_size is {global_batch_size!r} and there are {world_size} ranks; an int "
            f"of {world_size} or more is expected, a sample for each rank"
        )
    if batch_size != 1:
        raise ValueError(
            f"batch_size is {batch_size} and global_batch_size is {global_batch_size}; give "
            f"batch_size for batches of a fixed size per rank, or global_batch_size for steps of a "
            f"fixed size over all ranks"
        )
    return global_batch_size, max(1, global_batch_size // world_size)
