# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job and their shares of its data.

With ``ranks=Ranks()`` the ranks read one order that is independent of ranks. With a map-style
dataset, each step takes the next samples of the order, and :class:`RankBatchSampler` gives a rank
its run of them. With an iterable dataset, each rank reads some of the shards (:class:`RankShards`).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, IterableDataset, IterDataPipe, MapDataPipe, Sampler

from penstock import _C

Remainder = Literal["pad", "drop", "uneven"]
REMAINDERS = {
    "pad": _C.Remainder.PAD,
    "drop": _C.Remainder.DROP,
    "uneven": _C.Remainder.UNEVEN,
}


class RankSharding(NamedTuple):
    """Checked arguments of a loader about ranks."""

    job: JobRank
    step_size: int  # samples of a step, over all ranks
    batch_size: int  # of this rank, to torch's constructor
    remainder: Remainder
    owned_count: int | None = None  # samples of the dataset, if ranks take the ones that they own
    is_stream: bool = False  # the ranks share out shards, and not the samples of an order

    @staticmethod
    def of(arguments: dict[str, Any]) -> RankSharding:
        """Return the sharding that a loader's arguments ask for. Raises ValueError if it is
        impossible."""
        dataset, sampler = arguments["dataset"], arguments["sampler"]
        asked = arguments["sharding_words"]
        if isinstance(dataset, (IterDataPipe, MapDataPipe)):
            raise ValueError(
                f"{asked} does not support datapipes, which torch's iterator reads; use a "
                f"map-style or an iterable dataset"
            )
        if isinstance(dataset, IterableDataset):
            return _of_stream(arguments)
        if arguments["batch_sampler"] is not None or arguments["batch_size"] is None:
            raise ValueError(
                f"{asked} requires batches that the loader makes, but batch_sampler was passed, or "
                f"batch_size is None; pass batch_size or global_batch_size, and a sampler for a "
                f"custom order"
            )
        if isinstance(sampler, DistributedSampler):
            raise ValueError(
                f"{asked} must not be combined with a DistributedSampler, which already shards the "
                f"samples; omit one of the two"
            )
        job = JobRank.of(arguments["rank"], arguments["world_size"])
        step_size, batch_size = _sizes(arguments, job.world_size)
        remainder = arguments["remainder"]
        if remainder is None:
            remainder = "drop" if arguments["drop_last"] else "pad"
        if remainder not in REMAINDERS:
            raise ValueError(
                f"remainder must be one of {', '.join(map(repr, REMAINDERS))}, got {remainder!r}"
            )
        if step_size % job.world_size and remainder != "uneven":
            raise ValueError(
                f"global_batch_size is {step_size} and there are {job.world_size} ranks, so their "
                f"batches cannot have the same size; choose a multiple of {job.world_size}, or "
                f"pass remainder='uneven' to allow one more sample on some ranks"
            )
        owned_count = len(dataset) if arguments["share"] == "by_cache" else None
        return RankSharding(job, step_size, batch_size, cast(Remainder, remainder), owned_count)

    def batch_sampler(self, sampler: Any, sharding_words: str) -> RankBatchSampler:
        """Return this rank's part of the order of ``sampler``. Raises ValueError if it has no
        length, from which all ranks know the number of steps."""
        try:
            len(sampler)
        except TypeError:
            raise ValueError(
                f"{sharding_words} requires a sampler with a length, so that all ranks know the "
                f"number of steps of an epoch, but {type(sampler).__name__} has none; implement "
                f"its __len__()"
            ) from None
        return RankBatchSampler(sampler, self.job, self.step_size, self.remainder, self.owned_count)


def _of_stream(arguments: dict[str, Any]) -> RankSharding:
    """Return the sharding of an iterable dataset, whose shards are checked with other options."""
    if arguments["global_batch_size"] is not None:
        raise ValueError(
            f"global_batch_size must be None for the IterableDataset "
            f"{type(arguments['dataset']).__name__}, got {arguments['global_batch_size']!r}: each "
            f"of its batches is from one shard and the same for any number of ranks; give the "
            f"batch_size of one rank"
        )
    if arguments["share"] is not None:
        raise ValueError(
            f"share must be None for the IterableDataset {type(arguments['dataset']).__name__}, "
            f"got {arguments['share']!r}: each rank reads the shards that it keeps; leave share out"
        )
    remainder = "drop" if arguments["remainder"] is None else arguments["remainder"]
    if remainder not in ("drop", "uneven"):
        raise ValueError(
            f"remainder must be 'drop' (all ranks end before the first step for which one of them "
            f"has no batch) or 'uneven' (each rank ends independently) for the IterableDataset "
            f"{type(arguments['dataset']).__name__}, whose samples cannot be read twice, got "
            f"{remainder!r}"
        )
    job = JobRank.of(arguments["rank"], arguments["world_size"])
    return RankSharding(job, 0, arguments["batch_size"], cast(Remainder, remainder), is_stream=True)


def order_generator() -> torch.Generator:
    """Return the generator of an order without one from the program: the same on all ranks."""
    return torch.Generator().manual_seed(0)


def _sizes(arguments: dict[str, Any], world_size: int) -> tuple[int, int]:
    """Return the samples of a step, and of one rank's batch."""
    batch_size, global_batch_size = arguments["batch_size"], arguments["global_batch_size"]
    if global_batch_size is None:
        return batch_size * world_size, batch_size
    if type(global_batch_size) is not int or global_batch_size < world_size:
        raise ValueError(
            f"global_batch_size is {global_batch_size!r} and there are {world_size} ranks, but "
            f"must be an int of at least {world_size}, one sample for each rank"
        )
    if batch_size != 1:
        raise ValueError(
            f"batch_size is {batch_size} and global_batch_size is {global_batch_size}; pass "
            f"batch_size for a fixed batch size per rank, or global_batch_size for a fixed step "
            f"size over all ranks"
        )
    return global_batch_size, max(1, global_batch_size // world_size)


class PlacedSample(int):
    """Index of a sample, with its place in the order, for batches that are no run of the order."""

    place: int

    def __new__(cls, index: int, place: int) -> PlacedSample:
        placed = super().__new__(cls, index)
        placed.place = place
        return placed

    def __reduce__(self) -> tuple[Any, ...]:
        return PlacedSample, (int(self), self.place)


def has_places(indices: Any) -> bool:
    """Return whether these are the indices of a batch with a place for each."""
    return type(indices) is list and bool(indices) and type(indices[0]) is PlacedSample


class WholeStep(NamedTuple):
    """Samples of one step, of all ranks."""

    indices: list[Any]
    first_place: int  # in the order of the epoch


class RankStart(NamedTuple):
    """Where an epoch starts: before its first step, or where a state was taken."""

    step: int = 0
    sample: int = 0  # the first one of that step
    first_of_sampler: int = 0  # the sampler has a state, and starts after this many samples
    # Steps before it that were given and not committed: they come first.
    missing: tuple[int, ...] = ()
    # Their runs of one size: the first step, its first sample, and the step size.
    earlier: tuple[tuple[int, int, int], ...] = ()


class RankBatchSampler(Sampler[list[int]]):
    """Batches of indices for one rank of several, which all read ``sampler``'s one order.

    A step takes the next ``step_size`` samples of the order, and each rank a run of them. So the
    samples of a step are the same for any number of ranks with the same ``step_size``, and all
    ranks have the same number of steps. ``sampler`` must give the same order on all ranks, and must
    have a length. :class:`penstock.DataLoader` constructs one for ``ranks=Ranks()``.

    remainder: handling of the samples that do not fill the last step. "pad": they are distributed
        evenly, some of them twice. "drop": they are skipped. "uneven": some ranks have one more
        than others; if there are fewer samples than ranks, as "pad".
    owned_count: the number of samples of the dataset, of which each rank owns a block. Of a step,
    a rank gets the samples that it owns rather than a run, as far as the batches stay of the same
    size. They are `PlacedSample`s, since random numbers follow from places. None: runs.
    """

    def __init__(
        self,
        sampler: Any,
        job: JobRank,
        step_size: int,
        remainder: Remainder = "pad",
        owned_count: int | None = None,
    ) -> None:
        self.sampler = sampler
        self.rank, self.world_size = job
        self.step_size = step_size
        self.remainder = remainder
        self.owned_count = owned_count
        self.first_place = 0  # of the last batch, in the order of the epoch
        self.step = WholeStep([], 0)  # of the last batch
        self._start = RankStart()  # of the next iteration

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, which starts when its first item is requested: loaders call iter()
        # repeatedly.
        start = self._start
        self.begin_at(RankStart())
        share = self.share(start)  # a later resize() is for the next iteration
        order = iter(self.sampler)
        taken = start.first_of_sampler
        for step in itertools.chain(start.missing, range(start.step, share.step_count)):
            first, count = share.order_part(step)
            skipped = first - taken
            next(itertools.islice(order, skipped, skipped), None)
            self.step = WholeStep(list(itertools.islice(order, count)), first)
            taken = first + count
            indices, self.first_place = self._part(self.step, share, step)
            yield indices
        for _ in order:  # torch's samplers draw once more as they end
            pass

    def part_of(self, step: WholeStep) -> tuple[list[int], int]:
        """Return this rank's part of a step that was given before, possibly to another number of
        ranks: the indices and the place of the first."""
        options = self.options(RankStart())
        share = _C.RankShare.of_step(step.first_place, len(step.indices), options)
        return self._part(step, share, 0)

    def _part(self, whole: WholeStep, share: _C.RankShare, step: int) -> tuple[list[int], int]:
        """Return the rank's part of a step: the indices and the place of the first."""
        if self.owned_count is not None:
            return self._owned(whole, share, step)
        places = share.samples(step)
        return [whole.indices[at - whole.first_place] for at in places], share.first_place(step)

    def _owned(self, whole: WholeStep, share: _C.RankShare, step: int) -> tuple[list[int], int]:
        first, places = share.step_samples(step)
        indices = [whole.indices[place - whole.first_place] for place in places]
        count = cast(int, self.owned_count)
        for index in indices:
            if not (isinstance(index, int) and 0 <= index < count):
                raise ValueError(
                    f"share='by_cache' requires a sampler of indices from 0 to {count - 1}, the "
                    f"samples of the dataset, got {index!r}; pass such a sampler, or leave share "
                    f"out"
                )
        owners = _C.owners_of(indices, count, self.world_size)
        chosen = share.owned_samples(step, owners)
        return [PlacedSample(indices[place - first], place) for place in chosen], chosen[0]

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch."""
        return self.share(RankStart()).step_count

    def options(self, start: RankStart) -> _C.RankShareOptions:
        """Return the options of an epoch that starts there."""
        return _C.RankShareOptions(
            rank=self.rank,
            rank_count=self.world_size,
            step_size=self.step_size,
            remainder=REMAINDERS[self.remainder],
            first_step=start.step,
            first_sample=start.sample,
            earlier=start.earlier,
        )

    def share(self, start: RankStart) -> _C.RankShare:
        """Return the share of an epoch that starts there."""
        return _C.RankShare(len(self.sampler), self.options(start))

    def begin_at(self, start: RankStart) -> None:
        """Make the next iteration start there."""
        self._start = start

    def resize(self, job: JobRank, step_size: int) -> None:
        """Make the next iteration that of another rank, or of another number of ranks."""
        self.rank, self.world_size = job
        self.step_size = step_size

    @property
    def taken_count(self) -> int:
        """Return the number of samples up to the end of the last batch's step, in the order."""
        return self.step.first_place + len(self.step.indices)

    @property
    def start(self) -> RankStart:
        """Return where the next iteration starts."""
        return self._start


class RankShards(NamedTuple):
    """Shards of a rank: shard s of ``shard_count`` is read by rank ``s % world_size``. Picklable.

    A rank's stream numbers its shards from 0, and so do its workers' requests. The dataset's
    inputs, and the random numbers, all follow from the number that a shard has in the job.
    """

    rank: int
    world_size: int
    shard_count: int  # of the job

    @property
    def ids(self) -> range:
        """Return the job's numbers of this rank's shards, in the order of the rank's numbers."""
        return range(self.rank, self.shard_count, self.world_size)


class JobRank(NamedTuple):
    """One of the processes that train one model together, counted from 0."""

    rank: int
    world_size: int

    @staticmethod
    def of(rank: int | None, world_size: int | None) -> JobRank:
        """Return the rank that the caller names, or the rank of this process.

        It is determined by the first that exists: the default process group, or the variables RANK
        and WORLD_SIZE that torchrun sets; otherwise the process is the only one. Raises
        ``ValueError`` if one number is given without the other, or the two make no rank.
        """
        if (rank is None) != (world_size is None):
            raise ValueError(
                f"rank and world_size must be passed together, got rank={rank} and "
                f"world_size={world_size}; pass both, or neither to use the values of this process"
            )
        if rank is None or world_size is None:
            rank, world_size = _of_this_process()
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank and world_size must satisfy 0 <= rank < world_size, got rank={rank} and "
                f"world_size={world_size}; correct them"
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
            f"RANK and WORLD_SIZE must be integers, as torchrun sets them, got RANK={rank!r} and "
            f"WORLD_SIZE={world_size!r}"
        ) from None
