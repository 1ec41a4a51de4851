# SPDX-License-Identifier: Apache-2.0
"""The measured prices of one captured graph: timed calls, and how they scale."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from penstock import _C

_SCALE_MIN, _SCALE_MAX = 0.05, 20.0
SPOT_CALLS = 12  # every other one of the whole graph
_CALLS_BEFORE_SPOTS = 4


@dataclass
class CutPricing:
    """The measured prices of one graph, which go on from its cut to the next."""

    trainer_scale: float = 1.0
    times: int = 0
    changes: int = 0
    is_held: bool = False  # a change was taken back, or cannot be carried out; until loads shift
    left: list[frozenset[int]] = field(default_factory=list)  # units of plans, since loads shifted
    _spot_index: int = -_CALLS_BEFORE_SPOTS
    _seconds: dict[str, list[float]] = field(default_factory=lambda: {"whole": [], "suffix": []})

    @property
    def wants_spots(self) -> bool:
        return self._spot_index < SPOT_CALLS

    def next_spot(self) -> str | None:
        """The part that is timed in this call, if there is one: "whole" or "suffix"."""
        index = self._spot_index
        self._spot_index += 1
        return None if index < 0 else ("whole", "suffix")[index % 2]

    def begin_spots(self) -> None:
        """Has them taken of another cut."""
        self._spot_index = -_CALLS_BEFORE_SPOTS
        self._seconds = {"whole": [], "suffix": []}

    def note_spots(self, spots: list[tuple[str, float]]) -> None:
        for label, seconds in spots:
            self._seconds[label].append(seconds)

    def learn_scale(self, native: Any, workers: int) -> None:
        """Sets how much longer the trainer takes for what could move than calibration did."""
        whole, suffix = self._seconds["whole"], self._seconds["suffix"]
        if native is None or min(len(whole), len(suffix)) < SPOT_CALLS // 3:
            return
        saved_s = statistics.median(whole) - statistics.median(suffix)

        def planned_s(scale: float) -> float:
            prices = _C.Prices.of_local_workers(workers, trainer_scale=scale)
            none, chosen = (native.seconds(p, prices) for p in (native.none, native.chosen))
            return float(none.trainer_s - chosen.trainer_s)

        at_none, at_one = planned_s(0.0), planned_s(1.0)
        if at_one > at_none:
            self.trainer_scale = clamped_scale((saved_s - at_none) / (at_one - at_none))


def clamped_scale(scale: float) -> float:
    return min(_SCALE_MAX, max(_SCALE_MIN, scale))
