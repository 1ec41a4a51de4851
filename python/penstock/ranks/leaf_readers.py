# SPDX-License-Identifier: Apache-2.0
"""The leaves of a batch that only some ranks of a replica group read: the argument ``leaves``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.ranks.replica_group import LeafReaders, named_ranks


def named_leaves(leaves: Any) -> LeafReaders | None:
    """Return the ranks that ``leaves`` names for each leaf.

    Raises ``TypeError`` if it is no mapping of names to ranks, and ``ValueError`` if a name or the
    ranks of a leaf cannot be any.
    """
    if leaves is None:
        return None
    if not isinstance(leaves, Mapping):
        raise TypeError(
            f"leaves must be a mapping of names of tensors to the ranks that read them, got "
            f"{leaves!r}; pass a dict such as {{'pixels': [0, 1]}}"
        )
    if not leaves:
        raise ValueError(
            "leaves must name a tensor, got {}; leave leaves out if all ranks read all tensors"
        )
    readers: LeafReaders = {}
    for key, ranks in leaves.items():
        name = _name_of(key)
        if name in readers:
            raise ValueError(f"leaves must name {name!r} once, got it twice: as an int and as text")
        readers[name] = _ranks_of(key, ranks)
    return readers


def _name_of(key: Any) -> str:
    if type(key) is int and key >= 0:
        return str(key)
    if not isinstance(key, str):
        raise TypeError(
            f"leaves must have names of tensors as keys, got {key!r}; pass a text such as "
            f"'image.pixels', or an int for a position in a tuple"
        )
    if not all(key.split(".")):
        raise ValueError(
            f"leaves must have names of tensors as keys, got {key!r}; join the names of nested "
            f"containers by single dots, as in 'image.pixels'"
        )
    return key


def _ranks_of(key: Any, ranks: Any) -> tuple[int, ...]:
    argument = f"leaves[{key!r}]"
    found = named_ranks(ranks, argument)
    if not found or not all(type(rank) is int for rank in found) or len({*found}) != len(found):
        raise ValueError(
            f"{argument} must be different ranks, at least one, got {found}; name the ranks that "
            f"read the tensor, and leave a tensor that none reads out of the samples"
        )
    return tuple(sorted(found))


def check_leaves(leaves: Any, replica_group: Any) -> None:
    """Raise ``ValueError`` for ``leaves`` that do not fit the ``replica_group``, ranks or None."""
    if leaves is None:
        return
    if replica_group is None:
        raise ValueError(
            f"leaves requires replica_group, the ranks that share batches, got leaves={leaves} "
            f"without it; pass replica_group, or leave leaves out"
        )
    names = sorted(leaves)
    for name in names:
        inner = next((other for other in names if other.startswith(f"{name}.")), None)
        if inner is not None:
            raise ValueError(
                f"leaves must name a tensor once, got {name!r}, which contains {inner!r}; leave "
                f"one of the two out"
            )
    for name, ranks in leaves.items():
        if not set(ranks) <= set(replica_group):
            raise ValueError(
                f"leaves[{name!r}] must be ranks of the replica_group "
                f"{sorted(replica_group)}, got {list(ranks)}; name ranks of the whole job, as "
                f"replica_group does"
            )
