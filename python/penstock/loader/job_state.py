# SPDX-License-Identifier: Apache-2.0
"""The state of a job's loader, with ``shard_by_rank``, as a checkpoint of several ranks keeps it.

torch.distributed.checkpoint loads the keys that a new loader's state has, and goes into each
dictionary for them. So a job's state has the same keys at every place of the stream, and what a
dataset or a sampler says of itself stands in a tuple, which is kept as one value. JSON makes it a
list.
"""

from __future__ import annotations

from typing import Any

_OF_THE_USER = ("_index_sampler_state", "dataset", "sampler", "samplers")


def sealed(state: dict[str, Any]) -> dict[str, Any]:
    """The state with the keys of all jobs' states."""
    state = {"samples": 0, "sampler": None, "samplers": None, **state}
    for name in _OF_THE_USER:
        if isinstance(state[name], dict):
            state[name] = (state[name],)
    shards = state["shards"] or {"counts": [], "last": None, "states": None, "before": None}
    lists = {name: shards[name] and tuple(shards[name]) for name in ("states", "before")}
    state["shards"] = {**shards, **lists}
    return state


def opened(state: dict[str, Any]) -> dict[str, Any]:
    """The state with the dictionaries of the user's objects as they gave them."""
    parts = {name: state.get(name) for name in _OF_THE_USER}
    return state | {name: _unsealed(part) for name, part in parts.items()}


def _unsealed(part: Any) -> Any:
    is_sealed = isinstance(part, (list, tuple)) and len(part) == 1 and isinstance(part[0], dict)
    return part[0] if is_sealed else part
