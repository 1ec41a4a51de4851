# SPDX-License-Identifier: Apache-2.0
"""The picture of bench/pool_growth.py, as SVG: rates against the ideal, and the cost of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import svg

_WIDTH, _HEIGHT = 400, 300
_LEFT, _TOP, _RIGHT, _BOTTOM = 60, 36, 16, 44


def draw(
    worker_counts: Sequence[int],
    *,
    ideal: Sequence[float],
    rates: Sequence[float],
    trainer_us: Sequence[float],
    controller_us: Sequence[float],
) -> str:
    """Two plots side by side; both axes of each are logarithmic."""
    left = _Plot(0, "batches per second", worker_counts, [*ideal, *rates])
    left.line(ideal, "ideal", "ideal: workers / time of a batch", is_marked=False)
    left.line(rates, "one", "measured")
    right = _Plot(_WIDTH, "CPU microseconds of a batch", worker_counts, trainer_us, controller_us)
    right.line(trainer_us, "one", "trainer")
    right.line(controller_us, "two", "controller")
    return svg.document(2 * _WIDTH, _HEIGHT, [*left.parts, *right.parts])


class _Plot:
    def __init__(
        self, x0: int, title: str, worker_counts: Sequence[int], *values: Sequence[float]
    ) -> None:
        self._x0 = x0
        self._counts = worker_counts
        seen = [max(value, 1e-9) for series in values for value in series]
        self._low = math.floor(math.log10(min(seen)))
        self._high = max(math.ceil(math.log10(max(seen))), self._low + 1)
        self._labels = 0
        self.parts = [f'<text x="{x0 + _LEFT}" y="16" font-weight="bold">{title}</text>']
        bottom = _HEIGHT - _BOTTOM
        for power in range(self._low, self._high + 1):
            y = self._y(10.0**power)
            self.parts.append(svg.line("grid", x0 + _LEFT, y, x0 + _WIDTH - _RIGHT, y))
            label = f"{10.0**power:g}"
            self.parts.append(svg.text(x0 + _LEFT - 6, y + 4, label, "end"))
        for count in worker_counts:
            x = self._x(count)
            self.parts.append(svg.line("grid", x, _TOP, x, bottom))
            self.parts.append(svg.text(x, bottom + 16, str(count), "middle"))
        middle = x0 + (_LEFT + _WIDTH - _RIGHT) / 2
        self.parts.append(svg.text(middle, _HEIGHT - 8, "workers", "middle"))

    def line(
        self, values: Sequence[float], style: str, label: str, *, is_marked: bool = True
    ) -> None:
        places = [(self._x(c), self._y(v)) for c, v in zip(self._counts, values, strict=True)]
        self.parts.append(svg.curve(style, places))
        if is_marked:
            self.parts += [
                f'<circle class="{style}-mark" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
                for x, y in places
            ]
        y = _TOP + 14 + 18 * self._labels
        self._labels += 1
        self.parts += svg.legend(style, self._x0 + _LEFT + 10, y, label)

    def _x(self, count: int) -> float:
        low, high = math.log2(self._counts[0]), math.log2(self._counts[-1])
        share = (math.log2(count) - low) / max(high - low, 1e-9)
        return self._x0 + _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, value: float) -> float:
        share = (math.log10(max(value, 1e-9)) - self._low) / (self._high - self._low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)
