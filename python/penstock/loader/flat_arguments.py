# SPDX-License-Identifier: Apache-2.0
"""The former arguments of a loader in place of ``pool=Pool(...)`` and ``ranks=Ranks(...)``.

They work in this version, with a FutureWarning that shows the new arguments. The next version
removes them, and this module.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, NamedTuple

from penstock.loader.grouped_arguments import (
    Pool,
    Ranks,
    is_sharded,
    shown_pool,
    shown_record,
    unchecked,
)
from penstock.program_line import warn
from penstock.ranks.replica_group import ranks_of

_OF_POOL = ("keys", "code_paths", "trust_workers")


class NotGiven(Enum):
    """The default of an argument that a program should not pass, whatever the value."""

    NOT_GIVEN = "not given"

    def __repr__(self) -> str:
        return self.value


NOT_GIVEN = NotGiven.NOT_GIVEN


class Asked(NamedTuple):
    """The records that a program asks for, by grouped arguments or by flat ones."""

    pool: Pool
    ranks: Ranks
    is_sharded: bool  # whether the ranks share one order
    sharding_words: str  # the argument that asks for that, for error messages


def read_arguments(pool: Any, ranks: Any, flat: dict[str, Any]) -> Asked:
    """Return the records that a loader's arguments ask for. Flat values are not checked yet.

    Raises ValueError if a group is given both as a record and by flat arguments, and TypeError if
    ``ranks`` is no record.
    """
    if ranks is not None and not isinstance(ranks, Ranks):
        raise TypeError(
            f"ranks must be a penstock.Ranks or None, got {ranks!r}; pass ranks=Ranks() for the "
            f"rank of this process"
        )
    of_pool = {name: value for name, value in flat.items() if name in _OF_POOL}
    of_ranks = {name: value for name, value in flat.items() if name not in _OF_POOL}
    _refuse_mixture("pool", pool if isinstance(pool, Pool) else None, of_pool)
    _refuse_mixture("ranks", ranks, of_ranks)
    if not isinstance(pool, Pool):
        pool = unchecked(Pool(None), address=pool, **of_pool)
    if not of_ranks:
        return Asked(pool, ranks or Ranks(), is_sharded(ranks), "ranks=Ranks(...)")
    return Asked(pool, *_read_ranks(**of_ranks), "shard_by_rank=True")


def _read_ranks(
    shard_by_rank: Any = False, replica_group: Any = None, **others: Any
) -> tuple[Ranks, bool]:
    """Return the record of the flat arguments, and whether the ranks share one order.

    Raises ValueError for arguments that have no meaning together.
    """
    group = ranks_of(replica_group)
    if shard_by_rank and group is not None and others.get("rank") is None:
        raise ValueError(
            f"rank and world_size are required with shard_by_rank and "
            f"replica_group={list(group)}, where they count groups; pass both, as in "
            f"rank=mesh.get_local_rank('dp'), world_size=mesh['dp'].size()"
        )
    for name, value in others.items():
        if value is not None and not shard_by_rank:
            raise ValueError(
                f"{name} requires shard_by_rank=True, got {name}={value!r} without it; pass "
                f"shard_by_rank=True, or leave {name} out"
            )
    return unchecked(Ranks(), replica_group=group, **others), bool(shard_by_rank)


def warn_of_flat(asked: Asked, flat: dict[str, Any]) -> None:
    """Warn of flat arguments, with the arguments to write in their place."""
    if not flat:
        return
    written = []
    if any(name in _OF_POOL for name in flat):
        written.append(f"pool={shown_pool(asked.pool, _quoted)}")
    if any(name not in _OF_POOL for name in flat):
        has_ranks = asked.is_sharded or asked.ranks.replica_group is not None
        as_given = unchecked(asked.ranks, replica_group=flat.get("replica_group"))
        written.append(f"ranks={shown_record(as_given, _quoted) if has_ranks else None}")
    names = ", ".join(f"{name}=..." for name in flat)
    warn(f"DataLoader({names}) is deprecated; write {', '.join(written)}", FutureWarning)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse_mixture(group: str, record: Pool | Ranks | None, flat: dict[str, Any]) -> None:
    if record is None or not flat:
        return
    name, value = next(iter(flat.items()))
    kind = type(record).__name__
    remedy = f"write {group}={kind}(..., {name}=...)"
    if name == "shard_by_rank":
        remedy = "leave shard_by_rank out"
    raise ValueError(
        f"{name} must not be given with {group}={kind}(...), got {name}={value!r}; {remedy}"
    )
