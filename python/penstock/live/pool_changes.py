# SPDX-License-Identifier: Apache-2.0
"""What happened in a pool between two statuses. Pure.

A worker that is gone without having drained counts as dead: a controller drops who is silent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from penstock.live.pool_view import PoolView


class Change(NamedTuple):
    """As an event, without its time and number."""

    kind: str
    text: str
    trainer: str | None = None
    worker: str | None = None


def changes_between(before: PoolView, after: PoolView) -> Iterator[Change]:
    """Joining first, so that who is assigned has been heard of."""
    yield from _comings(before, after)
    yield from _assignments(before, after)
    yield from _hedges(before, after)
    yield from _plans(before, after)
    yield from _goings(before, after)
    yield from _scaling(before, after)


def _comings(before: PoolView, after: PoolView) -> Iterator[Change]:
    known = _ids(before)
    for worker in after.workers:
        if worker.id not in known:
            yield Change("worker_joined", f"worker {worker.name} joined", worker=worker.id)
    for trainer in after.trainers:
        if trainer.id not in known:
            text = f"{trainer.job} of {trainer.name} joined"
            yield Change("trainer_joined", text, trainer=trainer.id)


def _assignments(before: PoolView, after: PoolView) -> Iterator[Change]:
    worked_for = {worker.id: worker.works_for for worker in before.workers}
    for worker in after.workers:
        now = worker.works_for
        if now == worked_for.get(worker.id):
            continue
        if now is not None:
            text = f"worker {worker.name} works for {after.job_title(now)}"
        else:
            text = f"worker {worker.name} works for nobody"
        yield Change("assigned", text, trainer=now, worker=worker.id)


def _hedges(before: PoolView, after: PoolView) -> Iterator[Change]:
    hedged = {trainer.id: trainer.hedged_batches for trainer in before.trainers}
    for trainer in after.trainers:
        count = trainer.hedged_batches - hedged.get(trainer.id, trainer.hedged_batches)
        if count > 0:
            batches = "1 late batch was" if count == 1 else f"{count} late batches were"
            text = f"{batches} asked of a second worker for {trainer.job} of {trainer.name}"
            yield Change("hedged", text, trainer=trainer.id)


def _plans(before: PoolView, after: PoolView) -> Iterator[Change]:
    changes = {trainer.id: trainer.plan_changes for trainer in before.trainers}
    for trainer in after.trainers:
        if trainer.plan_changes > changes.get(trainer.id, trainer.plan_changes):
            text = f"other calls of {trainer.job} of {trainer.name} move to the workers than before"
            yield Change("replanned", text, trainer=trainer.id)


def _goings(before: PoolView, after: PoolView) -> Iterator[Change]:
    there = _ids(after)
    for worker in before.workers:
        if worker.id in there:
            continue
        if worker.state == "draining":
            yield Change("worker_left", f"worker {worker.name} left", worker=worker.id)
        else:
            text = f"worker {worker.name} is gone, and had not drained"
            if worker.works_for is not None:
                text += f"; it worked for {before.job_title(worker.works_for)}"
            yield Change("worker_died", text, trainer=worker.works_for, worker=worker.id)
    for trainer in before.trainers:
        if trainer.id not in there:
            text = f"{trainer.job} of {trainer.name} left"
            yield Change("trainer_left", text, trainer=trainer.id)


def _ids(view: PoolView) -> set[str]:
    return {worker.id for worker in view.workers} | {trainer.id for trainer in view.trainers}


def _scaling(before: PoolView, after: PoolView) -> Iterator[Change]:
    if before.engine is None or after.engine is None:
        return
    if before.engine.wanted != after.engine.wanted:
        yield Change(
            "scaled",
            f"engine {after.engine.name}: {after.engine.wanted} workers are wanted, "
            f"{before.engine.wanted} were before; {after.engine.reason}",
        )
