# SPDX-License-Identifier: Apache-2.0
"""A number of workers that remembers to be penstock's choice and not the user's."""

from __future__ import annotations

from typing import Any

from penstock import _C
from penstock.tuning.usable_cpus import usable_cpus

AUTO = "auto"


class AutomaticCount(int):
    """The value of a loader's ``num_workers`` after ``num_workers="auto"``.

    An int to everybody who reads it. A framework that builds a loader anew from the attributes of
    another hands it on, so that the new one chooses by itself too; copies and pickles keep it.
    """

    __slots__ = ()


def first_count(num_workers: Any, seeding: Any, shards: Any) -> Any:
    """The number of workers that the constructor stores for the ``num_workers`` that it was given.

    One of a loader that chose by itself is a plain number where this one cannot: accelerate copies
    torch's options, and ``seeding`` is none of them. Raises TypeError for a word but "auto".
    """
    is_asked_for = isinstance(num_workers, str) and num_workers == AUTO
    if isinstance(num_workers, str) and not is_asked_for:
        raise TypeError(
            f'num_workers is {num_workers!r}; a number of 0 or more, or the word "auto", is '
            f'expected; pass num_workers="auto" to have penstock choose'
        )
    if not is_asked_for and not isinstance(num_workers, AutomaticCount):
        return num_workers
    if not is_asked_for and seeding not in ("batch", "sample"):
        return int(num_workers)
    cpus = usable_cpus()
    if not is_asked_for:
        return AutomaticCount(min(num_workers, cpus))
    is_number = type(shards) is int and shards > 0  # else it is refused later
    return AutomaticCount(_C.WorkerLimits(cpus, shards if is_number else None).first_workers)
