# SPDX-License-Identifier: Apache-2.0
"""Where the time of a trainer's steps goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.loader.field_sums import FieldSums
from penstock.tuning.observation import spoken_time

# The parts of a step, as they are told to people, by the names of the fields of StepTimes.
PARTS = {
    "compute_s": "computing",
    "dataset_s": "the dataset",
    "collate_s": "collating",
    "prefix_s": "calls moved by offload()",
    "worker_s": "a free worker",
    "wire_s": "the wire",
    "device_s": "the copy to the device",
    "order_s": "the batch whose turn it is",
    "ranks_s": "other ranks",
    "loader_s": "the loader's own work",
}
WAITING_PARTS = tuple(name for name in PARTS if name not in ("compute_s", "loader_s"))


@dataclass(frozen=True, slots=True)
class StepTimes(FieldSums):
    """Where the seconds of ``steps`` steps went, added up. Every second is in exactly one field.

    A step is from one batch to the next. Of it ``compute_s`` is the program's: from when it had a
    batch until it asked for the next one. ``loader_s`` is the loader's own work on the program's
    thread. The other parts are waiting, told apart by the batch that ended the wait:
    ``worker_s`` until a worker began to make it, because all were busy or had to start,
    ``dataset_s`` until its samples were there, ``collate_s`` until they were a batch in shared
    memory, ``prefix_s`` until the calls that :func:`penstock.offload` moved had run, ``wire_s``
    until its last byte had arrived, and ``device_s`` until it was pinned, or its copy to the device
    begun. ``order_s`` is waiting while a later batch was here: ``in_order=False`` would end it.
    ``ranks_s`` is waiting for other ranks, where all take the same steps.
    """

    steps: int = 0
    compute_s: float = 0.0
    dataset_s: float = 0.0
    collate_s: float = 0.0
    prefix_s: float = 0.0
    worker_s: float = 0.0
    wire_s: float = 0.0
    device_s: float = 0.0
    order_s: float = 0.0
    ranks_s: float = 0.0
    loader_s: float = 0.0

    @property
    def total_s(self) -> float:
        return float(sum(getattr(self, name) for name in PARTS))

    @property
    def waiting_s(self) -> float:
        return float(sum(getattr(self, name) for name in WAITING_PARTS))

    @property
    def waiting_share(self) -> float:
        """The part of the time that was waiting, from 0 to 1; 0 before the first step."""
        return self.waiting_s / self.total_s if self.total_s > 0 else 0.0

    def __str__(self) -> str:
        if self.steps == 0:
            return "no step has been counted"
        step_s, total_s = self.total_s / self.steps, self.total_s

        def spoken(name: str) -> str:
            seconds = getattr(self, name)
            return f"{spoken_time(seconds / self.steps)} ({100 * seconds / total_s:.0f} %)"

        text = (
            f"a step took {spoken_time(step_s)}: {spoken('compute_s')} computing, "
            f"{spoken('loader_s')} in the loader"
        )
        waited = {name: getattr(self, name) for name in WAITING_PARTS}
        shown = sorted((name for name in waited if waited[name] > 0), key=lambda n: -waited[n])
        if not shown:
            return f"{text}, and no waiting"
        return f"{text}, and waiting for " + ", ".join(
            f"{PARTS[name]} {spoken(name)}" for name in shown
        )


@dataclass(frozen=True, slots=True)
class WorkerTimes(FieldSums):
    """Of one worker: the ``batches`` delivered that it made, the seconds that it took for their
    samples, for making batches of them and for calls that :func:`penstock.offload` moved, the
    seconds that they were on the wire, and ``waited_s``, for which the trainer waited for them."""

    batches: int = 0
    dataset_s: float = 0.0
    collate_s: float = 0.0
    prefix_s: float = 0.0
    wire_s: float = 0.0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SlowSample:
    """A sample that took its worker ``seconds``: the dataset's ``index``, where the batch was asked
    for by numbers, or else its ``place`` in batch ``batch`` of an epoch. Without a place it stands
    for all samples of the batch, which were not timed one by one: those of an iterable dataset, of
    ``__getitems__`` or ``fetch_threads``, and those that take less than 20 µs."""

    seconds: float
    index: int | None
    batch: int
    place: int | None
    worker: int

    def __str__(self) -> str:
        if self.index is not None:
            name = f"sample {self.index}"
        elif self.place is not None:
            name = f"sample {self.place} of batch {self.batch}"
        else:
            name = f"the samples of batch {self.batch}"
        return f"{name} took {spoken_time(self.seconds)}"


def step_times(counters: dict[str, Any]) -> StepTimes:
    """Of counters as a stream has them; takes theirs out."""
    return StepTimes(
        counters.pop("steps", 0), **{name: counters.pop(f"step_{name}", 0.0) for name in PARTS}
    )
