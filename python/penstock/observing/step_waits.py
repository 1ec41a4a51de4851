# SPDX-License-Identifier: Apache-2.0
"""What each moment of a call for a batch was spent on, as csrc/loader/step_ledger.h counts it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from penstock.loader.watched_steps import MadeBatch, WatchedStep


class Stretch(NamedTuple):
    """Some seconds of a call, from ``begin`` to ``end``; ``part`` is a field of StepTimes."""

    part: str
    begin: float
    end: float


def stretches(step: WatchedStep, later: Sequence[MadeBatch] = ()) -> list[Stretch]:
    """The whole of the call, in order. ``later`` are batches of the loader that came after those
    of ``step``: while one that follows in the epoch was here, the wait is for the order."""
    found: list[Stretch] = []
    place = step.entered_at
    for part, until in _ends(step, later):
        until = min(until, step.left_at)
        if until > place:
            _add(found, Stretch(part, place, until))
            place = until
    if not step.has_batch and not step.batches:
        # The epoch is over. Workers that are not persistent are ended in this call.
        part = "dataset_s" if step.is_own else "loader_s"
        return [Stretch(part, step.entered_at, step.left_at)]
    if place < step.left_at:
        _add(found, Stretch("loader_s", place, step.left_at))
    return found


def _ends(step: WatchedStep, later: Sequence[MadeBatch]) -> Iterator[tuple[str, float]]:
    """Until when the call was spent on which part, one after the other."""
    for place, batch in enumerate(step.batches):
        coming = (*step.batches[place + 1 :], *later)
        order_from = _first_ready(batch, coming)
        for part, until in (
            ("worker_s", batch.begun_at),
            ("dataset_s", batch.dataset_until),
            ("collate_s", batch.collate_until),
            ("prefix_s", batch.made_at),
            ("wire_s", batch.arrived_at),
            ("device_s", batch.staged_at),
        ):
            yield part, min(until, order_from)
        if order_from < batch.staged_at:
            yield "order_s", batch.staged_at
    if step.ranks is not None:
        yield "ranks_s", step.ranks[1]


def _first_ready(batch: MadeBatch, coming: Iterable[MadeBatch]) -> float:
    """When the first batch was here that follows this one in its epoch."""
    return min(
        (
            one.staged_at
            for one in coming
            if one.epoch == batch.epoch and one.sequence > batch.sequence
        ),
        default=float("inf"),
    )


def _add(found: list[Stretch], stretch: Stretch) -> None:
    if found and found[-1].part == stretch.part:
        found[-1] = found[-1]._replace(end=stretch.end)
    else:
        found.append(stretch)
