# SPDX-License-Identifier: Apache-2.0
"""The steps of ranks that are not committed, in the states of their loaders.

Ranks that share one order commit steps, which another number of ranks may divide after a resume. A
state names the steps that are left, and the runs of the order that they belong to: with a batch
size per rank, steps of before had another size. It has no trace of the number of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.loader.options import LoaderOptions
from penstock.ranks.sharding import RankBatchSampler, RankStart
from penstock.stream.places import PlacesLeft, places_from_json, places_to_json


def is_between(state: Mapping[str, Any]) -> bool:
    """Return whether a loader's state was taken between two epochs."""
    return state["base_seed"] is None or bool(state["_iterator_finished"])


def places_left(state: Mapping[str, Any]) -> PlacesLeft:
    """Return the batches left of the epoch of a state, which is in the middle of it."""
    left = state.get("left")
    if left is None:
        return PlacesLeft(state["_sampler_iter_yielded"])
    return PlacesLeft(left["through"], places_from_json(left["missing"]))


def rank_start(state: dict[str, Any]) -> RankStart:
    """Return where the order of ranks continues after a state in the middle of an epoch."""
    left = places_left(state)
    runs = (state.get("left") or {}).get("runs", ())
    return RankStart(
        left.through,
        state["samples"],
        samples_of_sampler(state),
        left.missing,
        tuple((first_step, first_sample, size) for first_step, first_sample, size in runs),
    )


def samples_of_sampler(state: dict[str, Any]) -> int:
    """Return the samples of the ranks' order that the sampler of a state has given; 0 without a
    state of the sampler, which gives them again."""
    if state["_index_sampler_state"] is None:
        return 0
    count: int = (state.get("sampler") or state).get("samples", state["samples"])
    return count


def check_steps(options: LoaderOptions, state: dict[str, Any]) -> None:
    """Raise ValueError if the ranks cannot divide a step that they are to be given again."""
    sampler = options.index_sampler
    if not isinstance(sampler, RankBatchSampler):
        return
    commits = state.get("commits") or {"earlier": ()}
    steps = [
        (first_place, len(indices))
        for epoch in commits["earlier"]
        for _, first_place, indices in epoch["batches"]
    ]
    share = sampler.share(RankStart())
    if not is_between(state):
        start = rank_start(state)
        share = sampler.share(start)
        steps += [share.order_part(step) for step in start.missing]
    for first_place, count in steps:
        if not share.can_divide(first_place, count):
            raise ValueError(
                f"the state has an uncommitted step of {count} samples, which {sampler.world_size} "
                f"ranks with remainder={sampler.remainder!r} cannot divide without losing or "
                f"repeating samples; resume with a number of ranks that divides {count}, or with "
                f"remainder='uneven' and at most {count} ranks, or commit the step before the "
                f"state is taken"
            )


def merge_commits(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of the rank that is behind the others, with the steps that it, or another
    rank, has not committed."""
    base = min(states, key=_position)
    for index, state in enumerate(states):
        names = ("built", "epoch", "base_seed", "generators")
        for name in names if _position(state) == _position(base) else names[:1]:
            if state[name] != base[name]:
                raise ValueError(
                    f"states {states.index(base)} and {index} differ in {name}: "
                    f"{shortened(base[name])} and {shortened(state[name])}; merge the states of "
                    f"the ranks of one job"
                )
    number, is_under_way = _position(base)
    earlier: dict[int, dict[str, Any]] = {}
    for state in states:
        for epoch in state["commits"]["earlier"]:
            if epoch["epoch"] < number:
                known = earlier.setdefault(epoch["epoch"], {**epoch, "batches": []})
                places = {batch[0] for batch in known["batches"]}
                known["batches"] += [one for one in epoch["batches"] if one[0] not in places]
    for epoch in earlier.values():
        epoch["batches"].sort(key=lambda batch: batch[0])
    merged = copy.deepcopy(base)
    merged["commits"]["earlier"] = [copy.deepcopy(earlier[one]) for one in sorted(earlier)]
    if is_under_way:
        _merge_left(merged, states, number)
    return merged


def _position(state: Mapping[str, Any]) -> tuple[int, bool]:
    """Return the number of the state's epoch, and whether it is in progress."""
    return state["commits"]["epoch"], not is_between(state)


def _merge_left(merged: dict[str, Any], states: Sequence[Mapping[str, Any]], number: int) -> None:
    """Give ``merged``, in the middle of epoch ``number``, the steps of it that are left."""
    under_way = [state for state in states if _position(state) == (number, True)]
    nearest = min(under_way, key=lambda state: places_left(state).through)
    through = places_left(nearest).through
    steps: dict[int, tuple[int, int]] = {}  # the first sample and the step size
    for state in states:
        steps = {**_steps_left(state, number), **steps}
    missing = sorted(step for step in steps if step < through)
    runs: list[tuple[int, int, int]] = []
    for step in missing:
        first, size = steps[step]
        if not runs or runs[-1][1:] != (first - (step - runs[-1][0]) * size, size):
            runs.append((step, first, size))
    of_sampler = min(under_way, key=lambda state: places_left(state).first)
    for name in ("_index_sampler_state", "sampler", "samplers"):
        merged[name] = copy.deepcopy(of_sampler.get(name))
    if missing and missing[0] < places_left(of_sampler).first and merged["_index_sampler_state"]:
        raise ValueError(
            f"step {missing[0]} of epoch {number} is not committed on a rank that is in "
            f"another epoch, and the state of the sampler at that step is gone; take the states "
            f"of all ranks in the same epoch"
        )
    count = through - len(missing)
    merged.update(_sampler_iter_yielded=count, _num_yielded=count, samples=nearest["samples"])
    merged["shards"] = {**merged["shards"], "counts": [count]}
    merged.pop("left", None)
    if missing:
        places = places_to_json(tuple(missing))
        merged["left"] = {"through": through, "missing": places, "runs": [*map(list, runs)]}


def _steps_left(state: Mapping[str, Any], number: int) -> dict[int, tuple[int, int]]:
    """Return the steps of an epoch that were given and not committed: the first sample, and the
    number of samples."""
    if _position(state) != (number, True):
        return {
            step: (first_sample, len(indices))
            for epoch in state["commits"]["earlier"]
            if epoch["epoch"] == number
            for step, first_sample, indices in epoch["batches"]
        }
    left = state.get("left") or {"missing": (), "runs": ()}
    found, runs = {}, [*left["runs"]]
    for step in places_from_json(left["missing"]):
        first_step, first_sample, size = [run for run in runs if run[0] <= step][-1]
        found[step] = first_sample + (step - first_step) * size, size
    return found


def shortened(value: Any) -> str:
    """Return a value for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
