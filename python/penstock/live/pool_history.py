# SPDX-License-Identifier: Apache-2.0
"""The last minutes of a pool as points of a series: of the pool, and of the trainers that are given
most batches. Of bounded size."""

from __future__ import annotations

from collections import deque
from typing import Any

from penstock.live.pool_view import PoolView

POINTS_MAX = 900  # a quarter of an hour, at one a second
TRAINERS_MAX = 24  # of one point


class PoolHistory:
    """Confined to the thread that takes the statuses."""

    def __init__(self) -> None:
        self._points: deque[dict[str, Any]] = deque(maxlen=POINTS_MAX)
        self._sequence = 0

    def add(self, view: PoolView) -> None:
        self._sequence += 1
        totals = view.totals()
        busiest = sorted(view.trainers, key=lambda one: one.batches_per_s or 0.0, reverse=True)
        self._points.append(
            {
                "sequence": self._sequence,
                "at": round(view.at, 3),
                "batches_per_s": _short(totals["batches_per_s"]),
                "bytes_per_s": _short(totals["bytes_per_s"]),
                "waited_share": _short(totals["waited_share"]),
                "workers": totals["workers"],
                "workers_serving": totals["workers_by_state"]["serving"],
                "workers_wanted": totals["workers_wanted"],
                "trainers": {
                    one.id: [_short(one.batches_per_s), _short(one.waited_share)]
                    for one in busiest[:TRAINERS_MAX]
                },
            }
        )

    def points(self) -> tuple[dict[str, Any], ...]:
        """Oldest first. Nobody changes a point."""
        return tuple(self._points)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
