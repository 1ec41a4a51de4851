# SPDX-License-Identifier: Apache-2.0
"""The states of loaders with ``ranks``.

If ranks share the shards of an iterable dataset, only a rank itself knows its place in its shards.
Its state records it by the job's numbers of the shards. The states of all ranks together are the
state of the job, from which a job of any size continues: each rank takes the part of its shards.

torch.distributed.checkpoint loads the keys of a new loader's state, and descends into each
dictionary for them. So a job's state has the same keys at every place of the stream and in all
versions of penstock, and the states of datasets and samplers are wrapped in a tuple, which is kept
as one value (:func:`sealed`). JSON makes it a list. The version of the data is the second item of
the tuple of the dataset's state, and the commits are the second item of the sampler's, since the
first versions of penstock had no keys for them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.loader.options import LoaderOptions
from penstock.loader.rank_commits import is_between, merge_commits, shortened
from penstock.ranks.sharding import RankBatchSampler, RankShards
from penstock.stream.progress import Progress

_LISTS = ("counts", "states", "before")  # of a state's shards, one item per shard
_OF_THE_USER = ("_index_sampler_state", "dataset", "sampler", "samplers")
_OF_COMMITS = ("left", "commits")


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the states of all ranks into the state of the job.

    For loaders with ``ranks`` and an iterable dataset, whose states are taken after the same step,
    and for loaders with ``ranks`` and ``commit`` whose ranks commit at different times: a step
    counts as committed if all ranks have committed it. Any rank can resume from the result with
    :meth:`penstock.DataLoader.load_state_dict`, in a job with the same or another number of
    ranks; for an iterable dataset, up to the number of shards.

    Args:
        states (Sequence[Mapping[str, Any]]): Result of ``loader.state_dict()`` of each rank, in any
            order.

    Returns:
        dict[str, Any]: State of the job.

    Raises:
        ValueError: If the states are not of one job; for an iterable dataset, also if the state of
            a rank is missing, or they are not of one step.

    Example::

        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, loader.state_dict())
        if dist.get_rank() == 0:
            torch.save(penstock.merge_states(states), "loader.pt")
    """
    if _have_commits(states):
        return sealed(merge_commits([opened(dict(state)) for state in states]))
    _check_kind(states)
    first = states[0]
    for name in ("built", "epoch", "base_seed", "generators", "dataset"):
        for index, state in enumerate(states):
            if state.get(name) != first.get(name):
                raise ValueError(
                    f"states {0} and {index} differ in {name}: {shortened(first.get(name))} and "
                    f"{shortened(state.get(name))}; merge the states of the ranks of one job, "
                    f"saved after the same step"
                )
    merged = copy.deepcopy(dict(first))
    if first["shards"] is None:
        return merged
    by_rank = _by_rank([state["shards"] for state in states])
    shard_count = first["built"]["shards"]
    if sorted(shard_id for one in by_rank for shard_id in one["ids"]) != [*range(shard_count)]:
        raise ValueError(
            f"the states are of shards {[one['ids'] for one in by_rank]}, but must be of each of "
            f"the {shard_count} shards of the dataset once; pass the states of the ranks of one job"
        )
    shards: dict[str, Any] = {"ids": [*range(shard_count)], "rank": None, "last": None}
    for name in _LISTS:
        places = {
            shard_id: value
            for one in by_rank
            for shard_id, value in zip(
                one["ids"], one[name] or [None] * len(one["ids"]), strict=True
            )
        }
        values = [places[shard_id] for shard_id in range(shard_count)]
        shards[name] = copy.deepcopy(values) if any(v is not None for v in values) else None
    shards["world_size"] = by_rank[0]["world_size"]
    shards["step"] = max(one["step"] for one in by_rank)
    shards["turns"] = [_last_id(one) for one in by_rank]
    merged["shards"] = shards
    if not is_between(first):
        merged["_sampler_iter_yielded"] = merged["_num_yielded"] = sum(shards["counts"])
    return merged


def note_rank(options: LoaderOptions, state: dict[str, Any], progress: Progress | None) -> None:
    """Add to a state the numbers of the job's shards that it covers."""
    of_rank = options.shards_of_rank
    if of_rank is None:
        return
    step = progress.step if progress else 0
    if is_between(state):
        state["_sampler_iter_yielded"] = state["_num_yielded"] = step  # the same on all ranks
    if state["shards"] is not None:
        state["shards"].update(
            ids=[*of_rank.ids],
            rank=of_rank.rank,
            world_size=of_rank.world_size,
            step=step,
            ends_alone=options.remainder == "uneven",
        )


def part_of_rank(options: LoaderOptions, state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the job's state for this rank's shards. Raises ValueError if the state
    lacks it. Another kind of state is returned unchanged, for later checks."""
    of_rank = options.shards_of_rank
    shards = state.get("shards")
    if of_rank is None or not isinstance(shards, Mapping):
        return state
    if state.get("built", {}).get("shards") != of_rank.shard_count:
        return state
    ids = shards.get("ids")
    if ids is None:
        raise ValueError(
            "the state was saved by a loader without ranks=Ranks(...), and does not name the rank "
            "whose shards it describes; build the loader as it was"
        )
    place = (shards["rank"], shards["world_size"])
    if place == (of_rank.rank, of_rank.world_size):
        return state
    if [*ids] != [*range(of_rank.shard_count)]:
        raise ValueError(
            f"the state is from rank {place[0]} of {place[1]} and describes the shards {ids}, but "
            f"this is rank {of_rank.rank} of {of_rank.world_size}; pass the states of all ranks to "
            f"penstock.merge_states(), and load its result"
        )
    part = dict(shards)
    for name in _LISTS:
        values = shards[name]
        part[name] = None if values is None else [values[shard_id] for shard_id in of_rank.ids]
    turns = part.pop("turns", None) or [_last_id(shards)]
    part.update(
        ids=[*of_rank.ids],
        last=_last_before(of_rank, turns),
        rank=of_rank.rank,
        world_size=of_rank.world_size,
    )
    state = {**state, "shards": part}
    if not is_between(state):
        state["_sampler_iter_yielded"] = state["_num_yielded"] = sum(part["counts"])
    return state


def sealed(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with the keys of all jobs' states. A sealed state stays as it is."""
    state = {"samples": 0, "sampler": None, "samplers": None, **state}
    for name in _OF_THE_USER:
        if isinstance(state[name], dict):
            state[name] = (state[name],)
    if "data" in state:  # it is not in a state that is sealed
        state = with_data(state, state.pop("data"))
    commits = {name: state.pop(name) for name in _OF_COMMITS if name in state}
    if commits:
        state["sampler"] = (_unsealed(state["sampler"]), commits)
    shards = state["shards"] or {"counts": [], "last": None, "states": None, "before": None}
    lists = {name: shards[name] and tuple(shards[name]) for name in ("states", "before")}
    state["shards"] = {**shards, **lists}
    return state


def with_data(state: dict[str, Any], data: str | None) -> dict[str, Any]:
    """Return a sealed state with another version of the data."""
    dataset = opened(state)["dataset"]
    if data is not None:
        dataset = (dataset, data)
    elif isinstance(dataset, dict):
        dataset = (dataset,)
    return {**state, "dataset": dataset}


def opened(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with the dictionaries of the user's objects in their original form."""
    parts = {name: state.get(name) for name in _OF_THE_USER}
    dataset = parts["dataset"]
    if isinstance(dataset, (list, tuple)) and len(dataset) == 2:  # noqa: PLR2004
        parts["dataset"], parts["data"] = dataset
    sampler = parts["sampler"]
    if isinstance(sampler, (list, tuple)) and len(sampler) == 2:  # noqa: PLR2004
        parts["sampler"], commits = sampler
        if isinstance(commits, Mapping):
            parts.update((name, commits[name]) for name in _OF_COMMITS if name in commits)
    return state | {name: _unsealed(part) for name, part in parts.items()}


def _have_commits(states: Sequence[Any]) -> bool:
    """Return whether these are states of ranks that share one order and commit its steps."""
    return bool(states) and all(
        isinstance(state, Mapping)
        and {"built", "shards", "base_seed"} <= {*state}
        and str(state["built"].get("batch_sampler")).startswith(RankBatchSampler.__name__)
        and isinstance(opened(dict(state)).get("commits"), Mapping)
        for state in states
    )


def _check_kind(states: Sequence[Mapping[str, Any]]) -> None:
    if not states:
        raise ValueError("merge_states() requires a state, got none; pass the states of all ranks")
    for index, state in enumerate(states):
        if not isinstance(state, Mapping) or not {"built", "shards", "base_seed"} <= {*state}:
            raise ValueError(
                f"state {index} of {len(states)} must be a result of a loader's state_dict(), got "
                f"{shortened(state)}; pass the states of all ranks"
            )
        if not state["built"].get("shared_by_rank"):
            raise ValueError(
                f"state {index} of {len(states)} must be from a loader with ranks=Ranks(...) and "
                f"an iterable dataset, or with commit; for other loaders, load the state of any "
                f"rank on all ranks without merging"
            )
    ended = [index for index, state in enumerate(states) if is_between(state)]
    if 0 < len(ended) < len(states):
        raise ValueError(
            f"states {ended} were saved between epochs and the others in the middle of one; save "
            f"the states of all ranks after the same step"
        )


def _by_rank(shards: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the shards of the states in the order of the ranks. Raises ValueError unless they are
    from all ranks at one step."""
    world_sizes = {one["world_size"] for one in shards}
    by_rank = {one["rank"]: one for one in shards if one["rank"] is not None}
    if len(world_sizes) > 1 or len(by_rank) < len(shards):
        places = [f"rank {one['rank']} of {one['world_size']}" for one in shards]
        raise ValueError(
            f"the states must be one from each rank of one job, got states of {', '.join(places)}"
        )
    missing = [rank for rank in range(max(world_sizes)) if rank not in by_rank]
    if missing:
        raise ValueError(
            f"the state of rank {', '.join(map(str, missing))} of {max(world_sizes)} is missing, "
            f"and with it the position in that rank's shards; pass the states of all ranks"
        )
    steps = {one["step"] for one in shards}
    if len(steps) > 1 and not shards[0].get("ends_alone"):
        raise ValueError(
            f"the states were saved after different steps, by rank "
            f"{[by_rank[rank]['step'] for rank in sorted(by_rank)]}; save the states of all ranks "
            f"after the same step"
        )
    return [by_rank[rank] for rank in sorted(by_rank)]


def _last_id(shards: Mapping[str, Any]) -> int | None:
    """Return the job's number of the shard of a rank's last batch."""
    last, ids = shards["last"], shards["ids"]
    return None if last is None else int(ids[last])


def _last_before(of_rank: RankShards, turns: Sequence[int | None]) -> int | None:
    """Return the rank's number of the shard before the one of its next batch.

    With as many ranks as before, each continues in its turn. Otherwise it continues with its first
    shard after the shard of the job's last batch, so that the ranks together continue in the turn
    of all shards.
    """
    ids = of_rank.ids
    if len(turns) == of_rank.world_size:
        last = turns[of_rank.rank]
        return None if last is None else ids.index(last)
    known = [last for last in turns if last is not None]
    if not known:
        return None
    following = (known[-1] + 1) % of_rank.shard_count
    place = next((place for place, shard_id in enumerate(ids) if shard_id >= following), 0)
    return (place - 1) % len(ids)


def _unsealed(part: Any) -> Any:
    is_sealed = isinstance(part, (list, tuple)) and len(part) == 1 and isinstance(part[0], dict)
    return part[0] if is_sealed else part
