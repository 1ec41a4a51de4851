# SPDX-License-Identifier: Apache-2.0
"""What torch.profiler and Nsight show of a step: a range for the batch, and what a wait was for.

The ranges of the wait and of unpacking, inside of it, are native.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from penstock import _C
from penstock.loader.step_times import PARTS, WAITING_PARTS

_WAIT_SHOWN_S = 1e-4


class CountedSteps(Protocol):
    """An iterator."""

    _num_yielded: int

    def counters(self) -> dict[str, Any]: ...


def in_batch_range(steps: CountedSteps, take: Callable[[], Any]) -> Any:
    """What ``take`` returns, in a range with the number of the batch in its epoch.

    What a wait was mostly for is known when it is over, and shown by an empty range after it.
    """

    def marked() -> Any:
        before = dict(steps.counters())  # with num_workers=0 they go on counting
        batch = take()
        after = steps.counters()
        waits = {
            name: after.get(f"step_{name}", 0.0) - before.get(f"step_{name}", 0.0)
            for name in WAITING_PARTS
        }
        longest = max(waits, key=lambda name: waits[name])
        if waits[longest] >= _WAIT_SHOWN_S:
            _C.in_profiler_range(f"penstock: waited for {PARTS[longest]}", _nothing)
        return batch

    return _C.in_profiler_range(f"penstock: batch {steps._num_yielded}", marked)


def _nothing() -> None: ...
