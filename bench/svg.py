# SPDX-License-Identifier: Apache-2.0
"""The elements of plots, as SVG."""

from __future__ import annotations

from collections.abc import Sequence

STYLE = """\
<style>
  text { font: 12px sans-serif; fill: #24292f }
  .grid { stroke: #d0d7de; stroke-width: 1 }
  .line { fill: none; stroke-width: 2 }
  .ideal { stroke: #8c959f; stroke-dasharray: 5 4 }
  .one { stroke: #0969da } .one-mark { fill: #0969da }
  .two { stroke: #bc4c00 } .two-mark { fill: #bc4c00 }
  .event { stroke: #57606a; stroke-width: 1; stroke-dasharray: 2 3 }
</style>"""


def document(width: int, height: int, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}">',
            STYLE,
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def line(style: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """``style`` is a class of STYLE, as for all that follow."""
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def curve(style: str, places: Sequence[tuple[float, float]]) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline class="line {style}" points="{points}"/>'


def legend(style: str, x: float, y: float, words: str) -> list[str]:
    """A short piece of the curve, and its label."""
    return [f'<path class="line {style}" d="M{x} {y - 4}h24"/>', text(x + 30, y, words, "start")]


def text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'
