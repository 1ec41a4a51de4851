# SPDX-License-Identifier: Apache-2.0
"""Another number of ranks between two steps of an epoch, while the loader is iterated.

The rest of the epoch is resumed from the job's state, as ``load_state_dict()`` of a new loader
would, but by the iterator that the program has: it is reset to the state's place, as an iterator
over persistent workers is at the start of an epoch. So its workers and its connections to a pool
stay. Everything that can be wrong is checked before the ranks agree on the change, and nothing is
changed before they have agreed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from penstock.errors import UnsupportedError
from penstock.loader.cache_stats import keep_owned
from penstock.loader.commit_ledger import CommitLedger
from penstock.loader.grouped_arguments import Ranks, unchecked
from penstock.loader.loader_run import LoaderRun, run_of
from penstock.loader.loader_state import begin_from, check_has_state, check_state, commits_of
from penstock.loader.local_iterator import LocalPoolIter
from penstock.loader.options import LoaderOptions
from penstock.loader.options_check import check_options
from penstock.loader.rank_agreement import facts_of_resize
from penstock.loader.rank_states import part_of_rank
from penstock.ranks.resizing import agree_on_resize
from penstock.ranks.sharding import JobRank, RankBatchSampler, RankSharding
from penstock.stream.progress import Progress
from penstock.stream.shard_state import copied_state, is_stateful

_DRAWN = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_WITHOUT_DRAWS = (SequentialSampler, list, tuple, range)


class _Iterator(Protocol):
    """Iterator of a loader with ranks."""

    _progress: Progress

    def continue_resharded(self, loader: DataLoader[Any]) -> None: ...

    def begin_steps(self, loading_s: float) -> None: ...


def reshard(
    loader: DataLoader[Any], job: JobRank, own_state: dict[str, Any], state: Any | None
) -> None:
    """Make the loader the one of rank ``job``, from ``state`` on; None: from ``own_state``, the
    loader's present state, on.

    Raises before anything is changed, except for errors of the program's dataset and sampler.
    """
    run = run_of(loader)
    before, after = _Numbers.of(loader), _Numbers.at(loader, job)
    running = _running(loader, run)
    is_own = state is None or dict(state) == own_state
    whole = own_state if is_own else copied_state(dict(cast(Mapping[str, Any], state)))
    after.install(loader)
    try:
        options = LoaderOptions.of(loader)
        check_options(options)
        if state is None and running is not None and options.is_iterable and before.job != job:
            raise ValueError(
                f"reshard() to rank {job.rank} of {job.world_size} requires state= in the middle "
                f"of an epoch of an iterable dataset, since rank {before.job.rank} of "
                f"{before.job.world_size} knows only its own shards; pass "
                f"state=penstock.merge_states(states) with the states of all old ranks"
            )
        continued = part_of_rank(options, whole)
        check_state(options, continued)
        ledger, commits = run.ledger(options), commits_of(options, continued)
        if running is not None and ledger is not None and commits and commits["earlier"]:
            count = sum(len(epoch["batches"]) for epoch in commits["earlier"])
            raise ValueError(
                f"reshard() in the middle of an epoch requires that the steps of earlier epochs "
                f"are committed, got {count} that are not; commit them, or make a new loader and "
                f"load the state"
            )
        facts = facts_of_resize(options, continued)
    finally:
        before.install(loader)
    folder = agree_on_resize(before.job, after.job, facts, run.resize_past)
    after.install(loader)
    if after.ranks.share == "by_cache":
        keep_owned(loader.dataset, job.rank, job.world_size)
    options = LoaderOptions.of(loader)
    if folder is not None:
        run.resize_folder = run.resize_past.folder = folder
    if run.step_agreement is not None:
        run.step_agreement.close()
        run.step_agreement = None
    if running is None:
        are_compared = run.are_ranks_compared or folder is not None
        idle = getattr(loader, "_iterator", None)  # over persistent workers
        if run.loaded_state is not None or not is_own or (commits and commits["earlier"]):
            run.begin_at(continued)
            _redivide(ledger, commits)
        elif isinstance(idle, LocalPoolIter) and options.is_map:
            idle.own_options = options.kept  # the next iter() resets it
        run.are_ranks_compared = are_compared
        return
    began_at = time.perf_counter()
    _redivide(ledger, commits)
    try:
        begin_from(options, run, continued, lambda: running.continue_resharded(loader))
    except BaseException:
        before.install(loader)
        run.begin_at(own_state)  # the next iter() loses nothing
        _redivide(ledger, commits_of(options, own_state))
        raise
    running.begin_steps(time.perf_counter() - began_at)


def _redivide(ledger: CommitLedger | None, commits: dict[str, Any] | None) -> None:
    """Have steps that were delivered and not committed delivered once more, to the ranks of the new
    size."""
    if ledger is not None:
        ledger.load(commits)
        ledger.reshard_count += 1


def check_can_reshard(options: LoaderOptions) -> None:
    """Raise UnsupportedError if a loader cannot continue with another number of ranks."""
    if not options.shard_by_rank:
        raise UnsupportedError(
            "reshard() requires ranks=Ranks(...), got a loader whose samples are not shared by "
            "ranks; pass ranks to DataLoader"
        )
    if options.replica_group is not None:
        raise UnsupportedError(
            f"reshard() does not support replica_group={list(options.replica_group)}, whose ranks "
            f"are connected for the life of the loader; make a new loader and load the state"
        )
    check_has_state(options)
    if not options.is_map:
        return
    if is_stateful(options.dataset):
        raise UnsupportedError(
            f"reshard() does not support the map-style dataset {type(options.dataset).__name__} "
            f"with a state_dict(), since its workers stay and have the state of the batches that "
            f"they have made ahead; make a new loader and load the state"
        )
    sampler = options.sampler
    is_drawn = type(sampler) in _DRAWN and isinstance(sampler.generator, torch.Generator)
    if not (is_stateful(sampler) or is_drawn or type(sampler) in _WITHOUT_DRAWS):
        raise UnsupportedError(
            f"reshard() requires a sampler that can be iterated from the place of a state, got "
            f"{type(sampler).__name__}, whose next iteration may have another order; give it "
            f"state_dict() and load_state_dict(), or pass a list of indices or one of torch's "
            f"samplers with a generator"
        )


class _Numbers(NamedTuple):
    """Attributes of a loader that follow from its number of ranks."""

    job: JobRank
    ranks: Ranks
    batch_size: int | None
    step_size: int  # of a map-style dataset

    @staticmethod
    def of(loader: DataLoader[Any]) -> _Numbers:
        options = LoaderOptions.of(loader)
        sampler = options.batch_sampler
        size = sampler.step_size if isinstance(sampler, RankBatchSampler) else 0
        return _Numbers(options.job_rank, cast(Ranks, options.ranks), options.batch_size, size)

    @staticmethod
    def at(loader: DataLoader[Any], job: JobRank) -> _Numbers:
        """Return the numbers as ``job``. Raises ValueError if the loader has none for it."""
        options = LoaderOptions.of(loader)
        ranks = cast(Ranks, options.ranks)
        sharding = RankSharding.of(
            {
                "rank": job.rank,
                "world_size": job.world_size,
                "global_batch_size": ranks.global_batch_size,
                "remainder": ranks.remainder,
                "share": ranks.share,
                "dataset": options.dataset,
                "sampler": options.sampler,
                "batch_sampler": None,  # the loader has made it
                "batch_size": 1 if ranks.global_batch_size is not None else options.batch_size,
                "drop_last": options.drop_last,
                "sharding_words": options.sharding_words,
            }
        )
        ranks = unchecked(ranks, rank=job.rank, world_size=job.world_size)
        return _Numbers(job, ranks, sharding.batch_size, sharding.step_size)

    def install(self, loader: DataLoader[Any]) -> None:
        # Torch forbids the assignment of batch_size.
        vars(loader).update(ranks=self.ranks, batch_size=self.batch_size)
        sampler = loader.batch_sampler
        if isinstance(sampler, RankBatchSampler):
            sampler.resize(self.job, self.step_size)


def _running(loader: DataLoader[Any], run: LoaderRun) -> _Iterator | None:
    """Return the iterator whose epoch is under way; None between epochs."""
    progress = run.progress
    if run.loaded_state is not None or progress is None or progress.base_seed is None:
        return None
    if progress.is_finished:
        return None
    known = {*run.returned_iterators, getattr(loader, "_iterator", None)}
    for iterator in known:
        is_last = getattr(iterator, "_progress", None) is progress
        if is_last and not getattr(iterator, "_shutdown", False):
            return cast(_Iterator, iterator)
    return None
