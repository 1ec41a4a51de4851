# SPDX-License-Identifier: Apache-2.0
"""The picture of bench/elastic.py, as SVG: batches per second and workers over time, with the
events of the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import svg

_WIDTH, _HEIGHT = 820, 210  # of each of the two plots
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 16, 44, 30
_STYLES = ("one", "two")


class Curve(NamedTuple):
    name: str
    points: Sequence[tuple[float, float]]  # seconds and a value


def draw(
    seconds: float,
    ceiling: float,
    rates: Sequence[Curve],
    counts: Sequence[Curve],
    events: Sequence[tuple[float, str]],
) -> str:
    """Two plots, one above the other, over the same seconds."""
    upper = _Plot(0, "batches per second", seconds, 1.15 * ceiling)
    upper.line([(0.0, ceiling), (seconds, ceiling)], "ideal")
    for curve, style in zip(rates, _STYLES, strict=False):
        upper.line(curve.points, style)
    most = max((value for curve in counts for _, value in curve.points), default=1.0)
    lower = _Plot(_HEIGHT, "workers", seconds, 1.15 * max(most, 1.0))
    for curve, style in zip(counts, _STYLES, strict=False):
        lower.line(_steps(curve.points), style)
    for plot in (upper, lower):
        for at, words in events:
            plot.event(at, words if plot is upper else "")
    return svg.document(_WIDTH, 2 * _HEIGHT, [*upper.parts, *lower.parts, *_legend(rates)])


def _steps(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    corners: list[tuple[float, float]] = []
    for at, value in points:
        if corners:
            corners.append((at, corners[-1][1]))
        corners.append((at, value))
    return corners


def _legend(rates: Sequence[Curve]) -> list[str]:
    entries = [("ideal", "the same loop on batches that are ready")]
    entries += [(style, curve.name) for curve, style in zip(rates, _STYLES, strict=False)]
    parts, x = [], 200
    for style, words in entries:
        parts += svg.legend(style, x, 16, words)
        x += 60 + 7 * len(words)
    return parts


class _Plot:
    def __init__(self, y0: float, title: str, seconds: float, most: float) -> None:
        self._y0, self._seconds, self._most = y0, seconds, most
        self.parts = [f'<text x="{_LEFT}" y="{y0 + 16}" font-weight="bold">{title}</text>']
        step = 5 if most > 8 else 1
        for value in range(0, int(most) + 1, step):
            y = self._y(value)
            self.parts.append(svg.line("grid", _LEFT, y, _WIDTH - _RIGHT, y))
            self.parts.append(svg.text(_LEFT - 6, y + 4, str(value), "end"))
        for second in range(0, int(seconds) + 1, 25):
            x = self._x(second)
            self.parts.append(svg.line("grid", x, self._y(0), x, self._y(0) + 4))
            self.parts.append(svg.text(x, self._y(0) + 18, f"{second} s", "middle"))

    def line(self, points: Sequence[tuple[float, float]], style: str) -> None:
        shown = [(at, value) for at, value in points if 0 <= at <= self._seconds]
        self.parts.append(svg.curve(style, [(self._x(at), self._y(value)) for at, value in shown]))

    def event(self, at: float, words: str) -> None:
        x = self._x(at)
        top = self._y(self._most)
        self.parts.append(svg.line("event", x, top, x, self._y(0)))
        if words:
            self.parts.append(svg.text(x + 4, top - 4, words, "start"))

    def _x(self, at: float) -> float:
        return _LEFT + at / self._seconds * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, value: float) -> float:
        return self._y0 + _HEIGHT - _BOTTOM - value / self._most * (_HEIGHT - _TOP - _BOTTOM)
