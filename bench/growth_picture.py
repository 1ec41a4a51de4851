# SPDX-License-Identifier: Apache-2.0
"""The picture of bench/pool_growth.py, as SVG: rates against the ideal, and the cost of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

_WIDTH, _HEIGHT = 400, 300
_LEFT, _TOP, _RIGHT, _BOTTOM = 60, 36, 16, 44
_STYLE = """\
<style>
  text { font: 12px sans-serif; fill: #24292f }
  .grid { stroke: #d0d7de; stroke-width: 1 }
  .line { fill: none; stroke-width: 2 }
  .ideal { stroke: #8c959f; stroke-dasharray: 5 4 }
  .one { stroke: #0969da } .one-mark { fill: #0969da }
  .two { stroke: #bc4c00 } .two-mark { fill: #bc4c00 }
</style>"""


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
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * _WIDTH}" height="{_HEIGHT}" '
            f'viewBox="0 0 {2 * _WIDTH} {_HEIGHT}">',
            _STYLE,
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *left.parts,
            *right.parts,
            "</svg>\n",
        ]
    )


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
            self.parts.append(_grid(x0 + _LEFT, y, x0 + _WIDTH - _RIGHT, y))
            label = f"{10.0**power:g}"
            self.parts.append(_text(x0 + _LEFT - 6, y + 4, label, "end"))
        for count in worker_counts:
            x = self._x(count)
            self.parts.append(_grid(x, _TOP, x, bottom))
            self.parts.append(_text(x, bottom + 16, str(count), "middle"))
        middle = x0 + (_LEFT + _WIDTH - _RIGHT) / 2
        self.parts.append(_text(middle, _HEIGHT - 8, "workers", "middle"))

    def line(
        self, values: Sequence[float], style: str, label: str, *, is_marked: bool = True
    ) -> None:
        places = [(self._x(c), self._y(v)) for c, v in zip(self._counts, values, strict=True)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        self.parts.append(f'<polyline class="line {style}" points="{points}"/>')
        if is_marked:
            self.parts += [
                f'<circle class="{style}-mark" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
                for x, y in places
            ]
        y = _TOP + 14 + 18 * self._labels
        self._labels += 1
        start = self._x0 + _LEFT + 10
        self.parts.append(f'<path class="line {style}" d="M{start} {y - 4}h24"/>')
        self.parts.append(_text(start + 30, y, label, "start"))

    def _x(self, count: int) -> float:
        low, high = math.log2(self._counts[0]), math.log2(self._counts[-1])
        share = (math.log2(count) - low) / max(high - low, 1e-9)
        return self._x0 + _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, value: float) -> float:
        share = (math.log10(max(value, 1e-9)) - self._low) / (self._high - self._low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _grid(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="grid" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
