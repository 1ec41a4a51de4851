# SPDX-License-Identifier: Apache-2.0
"""The state of a loader (``state_dict()``), and how ``load_state_dict()`` makes another loader
continue from it.

A state in the middle of an epoch holds the generators as they were before the epoch, and the number
of batches delivered in it. To resume, the loader starts that epoch again with those generators in
place, so that the base seed and the sampler's numbers are drawn again unchanged, and skips the
batches that were delivered. Keys with a leading underscore have the meaning that torchdata's
StatefulDataLoader gives them; accelerate reads and corrects them.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, Subset

from penstock.errors import StateUnsupportedError
from penstock.loader.data_version import data_version
from penstock.loader.loader_run import LoaderRun, WorkerIterator
from penstock.loader.options import LoaderOptions
from penstock.loader.rank_commits import (
    check_steps,
    is_between,
    places_left,
    rank_start,
    samples_of_sampler,
)
from penstock.loader.rank_states import note_rank, opened, sealed, with_data
from penstock.loader.state_check import check_built, check_form
from penstock.program_line import warn
from penstock.ranks.sharding import RankBatchSampler, RankStart, WholeStep
from penstock.stream.batch_seeds import generator_states
from penstock.stream.commits import OpenEpoch, PulledBatch
from penstock.stream.places import PlacesLeft, places_to_json
from penstock.stream.progress import (
    GeneratorSnapshot,
    GeneratorsReplayed,
    Progress,
    PullsReplayed,
    ResumePoint,
    SamplerPlace,
    own_generators,
    sampler_states,
)
from penstock.stream.shard_state import (
    ShardStart,
    ShardStarts,
    StateFailure,
    copied_state,
    is_stateful,
    load_between_epochs,
    load_shard_between_epochs,
)

_VERSION = 1
_VERSION_WITH_SKIPS = 2  # of a state with places that were skipped, which older readers miss
_VERSION_OF_SNAPSHOTS = 3  # parts may be from before or after the state's place
_VERSION_WITH_EARLIER = 4  # batches of earlier epochs are to be delivered first
_VERSION_WITH_BITS = 5  # many places that are left are written as bits
_VERSION_OF_RANK_COMMITS = 6  # ranks that share one order commit steps
# Allows states of other data where a framework calls load_state_dict().
OTHER_DATA_VARIABLE = "PENSTOCK_ALLOW_OTHER_DATA"
_T = TypeVar("_T")


def check_has_state(options: LoaderOptions) -> None:
    """Raise StateUnsupportedError if the loader's place in its stream cannot be determined."""
    if options.is_datapipe:
        raise StateUnsupportedError(
            "state_dict() does not support datapipes, since torch's iterator reads them and does "
            "not report its position; use a map-style or an iterable dataset"
        )
    is_free = options.is_parallel and not options.in_order
    if is_free and options.shard_by_rank and options.commit is None:
        raise StateUnsupportedError(
            f"state_dict() with {options.sharding_words} requires in_order=True, got "
            f"in_order=False, with which each rank delivers its steps in a different order; set "
            f"in_order=True, or commit the steps (commit=)"
        )


def state_of_now(
    options: LoaderOptions, run: LoaderRun, running: WorkerIterator | None, *, asks_workers: bool
) -> dict[str, Any]:
    """Return the state of a loader: of its epoch under way, or the one that it loaded.

    ``running`` is its iterator over persistent workers, if any. With ``asks_workers``, request the
    states of datasets from the workers that have not sent them. Raises RuntimeError if one of the
    program's objects does not return its state.
    """
    if run.loaded_state is not None:
        state = copied_state(run.loaded_state)
    else:
        state = _state_at(options, run, running, asks_workers)
        _raise_failures(state)
        note_rank(options, state, run.progress)
        _note_skipped(options, run, state)
        if (version := _data_version_of(options, run)) is not None:
            state["data"] = version
        if run.visits is not None and not options.is_seeded_by_batch:
            run.visits.note_state(state, is_between(state))
    return with_commits(options, run, state)


def with_commits(options: LoaderOptions, run: LoaderRun, state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` with the current batches of earlier epochs that are not committed."""
    of_ranks = options.is_same_on_all_ranks
    ledger = run.ledger(options)
    if ledger is None:
        return sealed(state) if of_ranks else state
    state = opened(state) if of_ranks else state
    state["commits"] = ledger.to_state(is_between(state))
    if state["commits"]["earlier"]:
        state["version"] = max(state["version"], _VERSION_WITH_EARLIER)
    if of_ranks:
        state["version"] = _VERSION_OF_RANK_COMMITS
        return sealed(state)
    return state


def commits_of(options: LoaderOptions, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a copy of the part of a state about commits."""
    state = opened(dict(state)) if options.is_same_on_all_ranks else state
    return copied_state(state.get("commits"))


def _data_version_of(options: LoaderOptions, run: LoaderRun) -> str | None:
    """Return the version of the loader's data. It is read once an epoch."""
    key = run.epoch_count, id(options.dataset)
    if run.data_version is None or run.data_version[0] != key:
        run.data_version = key, data_version(options.dataset)
    return run.data_version[1]


def with_data_checked(
    options: LoaderOptions, run: LoaderRun, state: dict[str, Any], *, allow_other_data: bool
) -> dict[str, Any]:
    """Return ``state`` for the data that this loader reads. Raise ValueError if that has another
    version than the state's, unless it is allowed."""
    is_sealed = options.is_same_on_all_ranks
    then = (opened(state) if is_sealed else state).get("data")
    now = _data_version_of(options, run)
    is_allowed = allow_other_data or os.environ.get(OTHER_DATA_VARIABLE) == "1"
    if then is not None and now is not None and then != now and not is_allowed:
        raise ValueError(
            f"the state is of data with {then} and this loader reads data with {now}, so the rest "
            f"of its stream is another; load the data of the state, or, if the samples are meant "
            f"to be others or only their version is, call load_state_dict(state, "
            f"allow_other_data=True) or set {OTHER_DATA_VARIABLE}=1"
        )
    if is_sealed:
        return with_data(state, now)
    others = {name: part for name, part in state.items() if name != "data"}
    return others if now is None else {**others, "data": now}


def _note_skipped(options: LoaderOptions, run: LoaderRun, state: dict[str, Any]) -> None:
    """Add the samples that were left out. Ranks with one state for all have different ones."""
    if options.is_same_on_all_ranks or (options.on_error == "raise" and len(run.skipped) == 0):
        return
    progress = run.progress
    of_epoch = None if progress is None or is_between(state) else progress.skips
    state["skipped"] = run.skipped.to_state(of_epoch)


def _state_at(
    options: LoaderOptions, run: LoaderRun, running: WorkerIterator | None, asks_workers: bool
) -> dict[str, Any]:
    """Make the state for state_of_now(), without the place of the loader's rank among others."""
    progress = run.progress
    is_under_way = (
        progress is not None and progress.base_seed is not None and not progress.is_finished
    )
    left = progress.left if progress else PlacesLeft(0)  # once: other threads may commit
    is_committed = progress is not None and progress.commits is not None
    yielded_count = progress.yielded_count if progress else 0
    state: dict[str, Any] = {
        "_sampler_iter_yielded": left.delivered_count,
        "_num_yielded": left.delivered_count if is_committed else yielded_count,
        "_index_sampler_state": None,
        "_iterator_finished": progress is not None and progress.is_finished,
        "version": _VERSION,
        "built": _built(options),
        "epoch": run.epoch_count,
        "base_seed": None,
        "draws_seed": not _keeps_its_seed(options, running),
        "generators": None,
        "shards": None,
        "dataset": None,
    }
    if progress is None or not is_under_way:
        state["generators"] = _generators(options, GeneratorSnapshot.take(options))
        if _carries_its_dataset(options):
            state["dataset"] = _state_of(options.dataset)
        of_iterator = _state_of_last_iterator(options, progress)
        if of_iterator is not None:
            state["iterator"] = of_iterator
        state["samplers"] = sampler_states(options)
        if progress is not None and progress.is_finished and _keeps_its_workers(options):
            before = states_at_end(options, progress, running if asks_workers else None)
            if any(one is not None for one in before):
                counts = [0] * len(before)
                state["shards"] = {"counts": counts, "last": None, "states": None, "before": before}
        return state
    if progress.start_as_json is None:
        progress.start_as_json = _generators(options, progress.start, progress.unused_globals)
    state.update(
        epoch=progress.epoch,
        base_seed=progress.base_seed,
        draws_seed=progress.draws_seed,
        generators=progress.start_as_json,
        shards={
            "counts": list(progress.shard_counts),
            "last": progress.last_shard_id,
            "states": _none_if_all_none(_states_of_shards(options, progress)),
            "before": _none_if_all_none(progress.states_before),
        },
    )
    _note_sampler(options, progress, left, state)
    if left.missing:
        missing = places_to_json(left.missing)
        version = _VERSION_WITH_SKIPS if type(missing) is list else _VERSION_WITH_BITS
        state["version"] = max(state["version"], version)
        state["left"] = {"through": left.through, "missing": missing}
        if progress.share is not None:
            runs = progress.share.runs_of(left.missing)
            state["left"]["runs"] = [list(run) for run in runs]
            state["version"] = _VERSION_OF_RANK_COMMITS
    if any(isinstance(one, dict) and "batches" in one for one in state["shards"]["states"] or ()):
        state["version"] = max(state["version"], _VERSION_OF_SNAPSHOTS)
    if progress.share is not None:
        # The same on all ranks, for any number of workers per rank.
        state["samples"] = progress.share.samples_before(left.through)
        state["shards"].update(counts=[left.delivered_count], last=None)
    return state


def _note_sampler(
    options: LoaderOptions, progress: Progress, left: PlacesLeft, state: dict[str, Any]
) -> None:
    """Add the state of the sampler in the middle of an epoch."""
    first = left.first
    if progress.sampler.pull_count == 0 or (first == 0 and progress.samplers_before is not None):
        # Their states at the start of the epoch.
        samplers = progress.samplers_before or sampler_states(options)
        if first == 0 or samplers is not None:
            state["samplers"] = samplers
        return
    place = progress.sampler.place(first)
    state["_index_sampler_state"] = place.state
    # A reader takes it for the state at the first batch left; of ranks, after their samples.
    expected = first if progress.share is None else left.through
    if place.state is None or (place.pull_count == expected and not place.is_over):
        return
    state["version"] = max(state["version"], _VERSION_OF_SNAPSHOTS)
    state["sampler"] = {
        "pulls": place.pull_count,
        "asked": list(place.asked),
        "is_over": place.is_over,
    }
    if progress.share is not None:
        state["sampler"]["samples"] = place.state["samples_yielded"]


def _states_of_shards(options: LoaderOptions, progress: Progress) -> list[Any]:
    """Return the states of the shards of an epoch under way; None for shards that start at their
    first batch, or are read again from there."""
    states = progress.shard_states
    counts = progress.shard_counts
    is_of_map = options.is_map
    if not options.is_parallel or options.has_pool or not is_stateful(options.dataset):
        return states
    are_unknown = [state is None for state in states]
    if any(are_unknown) and (
        progress.begins_in_unknown_state or not _can_repeat(options, progress)
    ):
        warn(
            f"state_dict() was called for the first time in the middle of an epoch whose workers "
            f"had already made batches of {type(options.dataset).__name__}, so the dataset's state "
            f"at the start of the epoch is unknown: a loader that resumes here starts the epoch "
            f"with the dataset as a new worker has it; call state_dict() once before the first "
            f"iter()",
            UserWarning,
        )
    elif is_of_map:
        for shard_id, count in enumerate(counts):
            if are_unknown[shard_id] and count > 0:
                states[shard_id] = {"batches": 0}  # they are made again
    return states


def _can_repeat(options: LoaderOptions, progress: Progress) -> bool:
    """Return whether a resume knows the batches that a worker made of a map-style dataset."""
    if not options.is_map:
        return True
    first = progress.left.first
    return bool(options.in_order) and (
        progress.sampler.pull_count == 0 or progress.sampler_place().state is None or first == 0
    )


def states_at_end(
    options: LoaderOptions, progress: Progress, asked: WorkerIterator | None
) -> list[Any]:
    """Return the states of the shards after an epoch, of workers that stay. The workers of
    ``asked`` are asked for states that they have not sent."""
    states = progress.shard_states
    are_known = all(isinstance(state, dict) and "batches" not in state for state in states)
    may_have_some = options.is_iterable or is_stateful(options.dataset)
    if may_have_some and not are_known and asked is not None:
        answered = asked.source.ask_states()
        states = [answered.get(shard_id) for shard_id in range(len(states))]
    return states


def _state_of(dataset: Any) -> Any:
    try:
        return copied_state(dataset.state_dict())
    except Exception as error:
        return StateFailure.of(dataset, error)


def _state_of_last_iterator(options: LoaderOptions, progress: Progress | None) -> Any:
    """Return the state of the dataset's iterator after an epoch in this process. None if it has
    none, if it is the dataset itself, and if no state that it can set outlives it."""
    if progress is None or options.is_parallel or options.is_seeded_by_batch:
        return None
    of_shard = progress.shard_states[0] or {}
    if isinstance(of_shard, StateFailure):
        return of_shard
    is_apart = "dataset" in of_shard or not is_stateful(options.dataset)
    return of_shard.get("iterator") if is_apart else None


def _generators(
    options: LoaderOptions, snapshot: GeneratorSnapshot, unused: Collection[str] = ()
) -> dict[str, Any]:
    """Return the generators that the stream is drawn from, each once, without the global ones that
    are ``unused``. Each rank has its own global ones."""
    left_out = _GLOBALS_TO_JSON if options.shard_by_rank else unused
    own = dict(snapshot.of_own)
    names: dict[int, str] = {}
    for name, generator in own_generators(options).items():
        if names.setdefault(id(generator), name) != name:
            own.pop(name, None)
    return {
        "globals": _globals_to_json(snapshot.of_globals, left_out),
        "own": {name: _tensor_to_text(state) for name, state in own.items()},
    }


def _none_if_all_none(states: list[Any]) -> list[Any] | None:
    return states if any(one is not None for one in states) else None


def _raise_failures(state: dict[str, Any]) -> None:
    """Raise RuntimeError if one of the program's objects did not return its state."""
    shards = state["shards"] or {}
    parts = [state["dataset"], state.get("iterator"), *(state.get("samplers") or {}).values()]
    for part in [*parts, *(shards.get("states") or ()), *(shards.get("before") or ())]:
        if isinstance(part, StateFailure):
            raise RuntimeError(
                f"state_dict() of the loader requires the states of its dataset and samplers, but "
                f"{part.text}; make its state_dict() work at any time, or do not save the loader's"
            )


def check_state(options: LoaderOptions, state: dict[str, Any]) -> None:
    """Raise ValueError when this loader cannot continue from ``state``."""
    if "built" not in state and _is_torchdata_state(state):
        raise ValueError(
            "the state was saved by torchdata's StatefulDataLoader, whose states have other "
            "contents than those of penstock's DataLoader; finish the epoch with torchdata, or "
            "start a new epoch here without load_state_dict(), and save the state_dict() of "
            "penstock's loader from then on"
        )
    if "built" not in state or "generators" not in state:
        raise ValueError(
            f"the state must be a result of state_dict() of penstock's DataLoader, got the keys "
            f"{sorted(map(str, state))}; load such a result"
        )
    version = state.get("version")
    known = range(_VERSION, _VERSION_OF_RANK_COMMITS + 1)
    if type(version) is not int or version not in known:
        raise ValueError(
            f"the state has version {version!r}, but this penstock supports versions {_VERSION} to "
            f"{_VERSION_OF_RANK_COMMITS}; resume with the version of penstock that saved it"
        )
    if options.is_same_on_all_ranks:
        state = opened(state)
    built, now = state["built"], _built(options)
    check_built(built)
    for name in [*built, *(name for name in now if name not in built)]:
        if now.get(name) != built.get(name):
            raise ValueError(
                f"the state is of a loader with {name} {built.get(name)!r} and this one has "
                f"{name} {now.get(name)!r}, so its stream is another; build the loader as it was"
            )
    check_form(options, state)
    check_steps(options, state)
    shards = state["shards"]
    if shards is None:
        return
    process_count = options.shard_count
    for states in (shards["states"], shards.get("before")):
        if states is not None and len(states) != process_count:
            raise ValueError(
                f"the state contains a state of {type(options.dataset).__name__} from each of "
                f"{len(states)} processes, but this loader reads it in {process_count}; resume "
                f"with num_workers={len(states)}"
            )
    if is_between(state):
        return
    answered_count = state["_sampler_iter_yielded"]
    left = places_left(state)
    if answered_count != left.delivered_count:
        raise ValueError(
            f"_sampler_iter_yielded is {answered_count} but {left.delivered_count} batches were "
            f"delivered, out of order, so the batches to repeat are unknown; load the state as "
            f"state_dict() returned it, or save it from a loader with in_order=True"
        )
    if answered_count < 0 or (
        now["kind"] == "iterable"
        and answered_count != sum(shards["counts"])
        and (len(shards["counts"]) > 1 or shards["states"] is not None)
    ):
        raise ValueError(
            f"_sampler_iter_yielded is {answered_count} but the shards returned "
            f"{sum(shards['counts'])} batches; load the state as state_dict() returned it"
        )


def _is_torchdata_state(state: dict[str, Any]) -> bool:
    of_workers = {"_snapshot", "_steps_since_snapshot"}
    of_one_process = {"_sampler_iter_yielded", "_num_yielded"}
    return any(names <= state.keys() for names in (of_workers, of_one_process))


def begin_from(
    options: LoaderOptions, run: LoaderRun, state: dict[str, Any], begin: Callable[[], _T]
) -> _T:
    """Call ``begin``, which makes the loader's next iterator, so that it continues from ``state``.

    The global generators stay as they are, unless ``state`` is current and between epochs: then
    they are drawn from as by any ``iter()``.
    """
    check_state(options, state)
    if options.is_same_on_all_ranks:
        state = opened(state)
    run.epoch_count = state["epoch"]
    run.skipped.load(state)
    if state["_iterator_finished"] and state["base_seed"] is not None:
        run.epoch_count += options.is_seeded_by_batch
        return begin()  # accelerate reached the end before the iterator did
    snapshot = _snapshot_from_json(state["generators"])
    for name, of_sampler in (state.get("samplers") or {}).items():
        load_between_epochs(getattr(options, name), of_sampler)  # check_form() has checked it
    snapshot.restore_own(options)
    parts = {name: state.get(name) for name in ("dataset", "iterator")}
    load_shard_between_epochs(
        options.dataset, {name: part for name, part in parts.items() if part is not None}
    )
    starts_epoch = is_between(state)
    globals_then = _with_current_states(state["generators"]["globals"])
    is_of_now = globals_then == _globals_to_json(generator_states())
    is_replayed = not starts_epoch or not is_of_now
    progress = run.resuming = Progress(
        state["epoch"],
        snapshot,
        options.shard_count,
        is_replayed=is_replayed,
        draws_seed=state["draws_seed"],
        point=None if starts_epoch else _resume_point(options, state),
    )
    if state["shards"] is not None and not starts_epoch:
        progress.first_step = state["shards"].get("step", 0)
    if state["shards"] is not None and state["shards"].get("before") is not None:
        progress.states_before = list(state["shards"]["before"])
    index_sampler = options.index_sampler
    if isinstance(index_sampler, RankBatchSampler) and not starts_epoch:
        index_sampler.begin_at(rank_start(state))
    try:
        with GeneratorsReplayed(snapshot) if is_replayed else contextlib.nullcontext():
            iterator = begin()
        finish, progress.finish_resuming = progress.finish_resuming, None
        if finish is not None:
            finish()
        return iterator
    except BaseException:
        if isinstance(index_sampler, RankBatchSampler):
            index_sampler.begin_at(RankStart())
        raise
    finally:
        run.resuming = None


def begin_repeat(
    options: LoaderOptions, run: LoaderRun, epoch: OpenEpoch, begin: Callable[[], _T]
) -> _T:
    """Call ``begin``, which makes the loader's next iterator, so that it delivers the batches of an
    earlier epoch that are not committed. The generators stay as they are."""
    snapshot = GeneratorSnapshot.take(options)
    pulled = tuple(epoch.pulled[place] for place in sorted(epoch.pulled))
    sampler = options.index_sampler
    if isinstance(sampler, RankBatchSampler):
        pulled = tuple(PulledBatch(*sampler.part_of(WholeStep(*one))) for one in pulled)
    left = epoch.left()
    last_shard_id = (left.delivered_count - 1) % options.shard_count
    point = ResumePoint(
        epoch.base_seed,
        left,
        left.delivered_count,
        last_shard_id,
        {},
        SamplerPlace(None, left.first),
        {},
        pulled,
    )
    progress = run.resuming = Progress(
        epoch.seed_epoch, snapshot, options.shard_count, is_replayed=True, point=point
    )
    progress.commits = epoch
    run.epoch_count, epoch_count = epoch.seed_epoch, run.epoch_count
    run.repeated = [one.index for one in pulled]
    try:
        with PullsReplayed(snapshot, options):
            return begin()
    finally:
        run.resuming = run.repeated = None
        run.epoch_count = epoch_count


def _keeps_its_seed(options: LoaderOptions, running: WorkerIterator | None) -> bool:
    """Return whether the next ``iter()`` only resets the iterator, which then keeps its base
    seed."""
    is_reset = bool(options.persistent_workers) and running is not None
    return is_reset and not options.is_seeded_by_batch


def _keeps_its_workers(options: LoaderOptions) -> bool:
    """Return whether the next epoch continues with the datasets as the workers have them."""
    return bool(options.persistent_workers) and options.is_parallel and not options.has_pool


def _carries_its_dataset(options: LoaderOptions) -> bool:
    """Return whether the next epoch continues with the dataset's state in this process."""
    return not options.is_parallel and is_stateful(options.dataset)


def _resume_point(options: LoaderOptions, state: dict[str, Any]) -> ResumePoint:
    shards = state["shards"]
    is_iterable = options.is_iterable
    counts = shards["counts"]
    if is_iterable and len(counts) == 1:
        counts = [state["_sampler_iter_yielded"]]  # accelerate may have corrected it
    states = shards["states"] or [None] * len(counts)
    starts: ShardStarts = {
        shard_id: ShardStart(count, one)
        for shard_id, (count, one) in enumerate(zip(counts, states, strict=True))
        if (is_iterable and count > 0) or one is not None
    }
    last_shard_id = shards["last"]
    if not is_iterable:  # the current processes, of any number, get batches in turn
        last_shard_id = (state["_sampler_iter_yielded"] - 1) % options.shard_count
    left = places_left(state)
    of_sampler = state.get("sampler") or {}
    sampler_state = state["_index_sampler_state"]
    if sampler_state is not None and isinstance(options.index_sampler, RankBatchSampler):
        # Older states have the samples of the rank.
        sampler_state = {**sampler_state, "samples_yielded": samples_of_sampler(state)}
    return ResumePoint(
        state["base_seed"],
        left,
        state["_num_yielded"],
        last_shard_id,
        starts,
        SamplerPlace(
            sampler_state,
            of_sampler.get("pulls", left.first),
            tuple(of_sampler.get("asked", ())),
            of_sampler.get("is_over", False),
        ),
        {} if is_iterable else _repeated(starts, left.delivered_count, options.shard_count),
    )


def _repeated(starts: ShardStarts, delivered_count: int, process_count: int) -> dict[int, int]:
    """Return the batches of a map-style dataset that processes make again, by their numbers: the
    last ones requested from each process in its turn."""
    repeated: dict[int, int] = {}
    for shard_id, start in starts.items():
        count = start.batch_count - start.state_count
        end = delivered_count - 1 - (delivered_count - 1 - shard_id) % process_count
        repeated.update(
            (end - process_count * step, shard_id) for step in range(count) if delivered_count > 0
        )
    if any(place < 0 for place in repeated):
        raise ValueError(
            f"state['shards']['counts'] has more batches of a process than the {delivered_count} "
            f"that were delivered; load the state as state_dict() returned it"
        )
    return repeated


def _built(options: LoaderOptions) -> dict[str, Any]:
    """Return the inputs that the stream follows from, apart from the dataset's content."""
    is_map = options.is_map
    is_shared = options.reads_shards_of_rank
    try:
        sample_count = len(options.dataset) if is_map else None
    except TypeError:
        sample_count = None
    built = {
        "kind": "map" if is_map else "iterable",
        "batch_size": options.batch_size,
        "drop_last": options.drop_last,
        "dataset length": sample_count,
        "seeding": _seeding(options),
        "shards": None if is_map else options.shards if is_shared else options.shard_count,
        "sampler": _sampler_name(options.sampler) if is_map else None,
        "batch_sampler": _sampler_name(options.batch_sampler) if is_map else None,
    }
    selection = vars(options.dataset).get("selection") if type(options.dataset) is Subset else None
    if selection is not None:  # by penstock.filtered()
        built.update(selection=selection)
    if is_shared:
        built.update(shared_by_rank=True)
    elif options.shard_by_rank:  # the order is the same for any batch size
        built.update(batch_size=None, drop_last=None)
    return built


def _seeding(options: LoaderOptions) -> str:
    if options.is_seeded_by_sample:
        return "sample"
    return "batch" if options.is_seeded_by_batch else "worker"


def _sampler_name(sampler: Any) -> str | None:
    if sampler is None:
        return None
    name = type(sampler).__qualname__
    if type(sampler) is BatchSampler:
        left_out = ", last one left out" if sampler.drop_last else ""
        return f"{name} of {sampler.batch_size} over {_sampler_name(sampler.sampler)}{left_out}"
    if isinstance(sampler, RankBatchSampler):
        return f"{name} over {_sampler_name(sampler.sampler)}"
    if type(sampler) is not RandomSampler:
        return name
    generator = "no generator" if sampler.generator is None else "a generator"
    replacement = ", replacement" if sampler.replacement else ""
    return f"{name} of {sampler.num_samples} samples with {generator}{replacement}"


def _snapshot_from_json(state: dict[str, Any]) -> GeneratorSnapshot:
    state = {**state, "globals": _with_current_states(state["globals"])}
    of_numpy = {**state["globals"]["numpy"]}
    of_numpy["state"] = {**of_numpy["state"]}
    if of_numpy["bit_generator"] == "MT19937":
        of_numpy["state"]["key"] = np.array(of_numpy["state"]["key"], dtype=np.uint32)
    version, words, gauss_next = state["globals"]["random"]
    return GeneratorSnapshot(
        (_text_to_tensor(state["globals"]["torch"]), (version, tuple(words), gauss_next), of_numpy),
        {name: _text_to_tensor(text) for name, text in state["own"].items()},
    )


def _globals_to_json(states: tuple[Any, ...], left_out: Collection[str] = ()) -> dict[str, Any]:
    """Return the states of the global generators by name; None for ``left_out``."""
    return {
        name: None if name in left_out else to_json(state)
        for (name, to_json), state in zip(_GLOBALS_TO_JSON.items(), states, strict=True)
    }


def _with_current_states(states: dict[str, Any]) -> dict[str, Any]:
    """Return the states of the global generators. A C++ program has only torch's; the others stay
    as they are."""
    of_now = _globals_to_json(generator_states())
    return {name: of_now[name] if state is None else state for name, state in states.items()}


def _to_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _to_plain(part) for name, part in value.items()}
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _tensor_to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


# In the order of generator_states().
_GLOBALS_TO_JSON: dict[str, Callable[[Any], Any]] = {
    "torch": _tensor_to_text,
    "random": lambda state: [state[0], list(state[1]), state[2]],
    "numpy": _to_plain,
}


def _text_to_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
