# SPDX-License-Identifier: Apache-2.0
"""The picture of the quickstart: photographs per second, and how the time of a step is spent.

The ground is transparent, and each colour is readable on a white page and on a dark one. A style
for dark pages would not do: within a page a browser may give an image another colour scheme than
the page's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from report import LABELS, Run

WIDTH, MARGIN, LABEL_WIDTH = 860, 16, 150
BAR_HEIGHT, ROW_HEIGHT, LEGEND_HEIGHT = 22, 32, 22
BAR_WIDTH = WIDTH - 2 * MARGIN - LABEL_WIDTH - 130  # the rest is for the figure behind the bar
CHARACTER_WIDTH = 6.8  # of 13 px sans-serif, amply
SHARE_SHOWN = 0.01  # parts of a step that are less than this in each training are one

TEXT, ON_BAR = "#747b85", "#ffffff"
WAY_COLOURS = {"torch": "#656d76", "swapped": "#2a6fca", "offload": "#b35309"}

# The parts of a step in the order of a bar, by the fields of penstock's StepTimes.
PARTS = {
    "compute_s": ("computing", "#2a6fca"),
    "dataset_s": ("waiting for the dataset", "#b35309"),
    "collate_s": ("waiting for collating", "#8a6100"),
    "prefix_s": ("waiting for moved calls", "#8250df"),
    "worker_s": ("waiting for a free worker", "#c93540"),
    "wire_s": ("waiting for the wire", "#0f7b83"),
    "device_s": ("waiting for the copy to the device", "#a83a8c"),
    "order_s": ("waiting for an earlier batch", "#2b7f4f"),
    "ranks_s": ("waiting for other ranks", "#5b6a00"),
    "loader_s": ("the loader itself", "#4f6b8a"),
}
REST = ("parts below 1 %", "#656d76")


def draw(runs: Sequence[Run], equal: bool, path: Path) -> None:
    """Writes the picture; equal figures give equal bytes."""
    timed = [run for run in runs if run.ledger]
    shown = _shown_parts(timed)
    legend = _legend_rows(shown)
    height = 2 * MARGIN + 58 + ROW_HEIGHT * len(runs)
    if timed:
        height += 48 + ROW_HEIGHT * len(timed) + LEGEND_HEIGHT * len(legend)
    svg = ElementTree.Element(
        "svg",
        {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {WIDTH} {height}"}
        | {"width": str(WIDTH), "height": str(height), "role": "img"},
    )
    svg.append(ElementTree.Comment(" SPDX-License-Identifier: Apache-2.0 "))
    ElementTree.SubElement(svg, "title").text = _svg_title(runs)
    style = ElementTree.SubElement(svg, "style")
    style.text = (
        f"text {{ font: 13px sans-serif; fill: {TEXT} }} .head {{ font-weight: bold }}"
        f" .on-bar {{ font-size: 12px; fill: {ON_BAR}; text-anchor: middle }}"
    )
    y = MARGIN + 14
    _text(svg, MARGIN, y, _verdict(runs, equal))
    y = _speeds(svg, y + 30, runs)
    if timed:
        y = _steps(svg, y + 30, timed, shown)
        _legend(svg, y + 14, legend)
    ElementTree.indent(svg)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(ElementTree.tostring(svg, encoding="unicode") + "\n")


def _verdict(runs: Sequence[Run], equal: bool) -> str:
    steps = f"{len(runs[0].losses)} steps"
    if len(runs) == 1:
        return f"One training of {steps}."
    verdict = "losses bit-for-bit identical" if equal else "LOSSES DIFFER"
    return f"One training with each loader, {steps} each: {verdict}."


def _svg_title(runs: Sequence[Run]) -> str:
    rates = (f"{run.samples_per_s:.0f} with {LABELS[run.way]}" for run in runs)
    return f"Photographs per second: {', '.join(rates)}"


def _speeds(svg: ElementTree.Element, y: float, runs: Sequence[Run]) -> float:
    """Draws the bars from ``y`` on and returns where they end."""
    _text(svg, MARGIN, y, "Photographs per second", "head")
    first, most = runs[0].samples_per_s, max(run.samples_per_s for run in runs)
    y += 12
    for run in runs:
        width = BAR_WIDTH * run.samples_per_s / most
        ratio = "" if run is runs[0] else f"   {run.samples_per_s / first:.2f}x"
        _bar(svg, MARGIN + LABEL_WIDTH, y, width, WAY_COLOURS[run.way])
        _row_texts(svg, y, LABELS[run.way], width, f"{run.samples_per_s:.0f}{ratio}")
        y += ROW_HEIGHT
    return y


def _steps(svg: ElementTree.Element, y: float, timed: Sequence[Run], shown: Sequence[str]) -> float:
    _text(svg, MARGIN, y, "Where the time of a step goes, in milliseconds", "head")
    steps_ms = [{name: 1e3 * value for name, value in run.step_parts.items()} for run in timed]
    longest = max(sum(parts.values()) for parts in steps_ms)
    y += 12
    for run, parts in zip(timed, steps_ms, strict=True):
        total = sum(parts.values())
        rest = total - sum(parts[name] for name in shown)
        segments = [(parts[name], PARTS[name][1]) for name in shown] + [(rest, REST[1])]
        x = float(MARGIN + LABEL_WIDTH)
        for value, colour in segments:
            width = BAR_WIDTH * value / longest
            _bar(svg, x, y, max(width - 1, 0), colour)
            if width > 36:
                _text(svg, x + width / 2, y + 15.5, f"{value:.1f}", "on-bar")
            x += width
        _row_texts(svg, y, LABELS[run.way], BAR_WIDTH * total / longest, f"{total:.1f} ms")
        y += ROW_HEIGHT
    return y


def _shown_parts(timed: Sequence[Run]) -> list[str]:
    """The parts that take at least SHARE_SHOWN of the time of one of the trainings."""
    return [
        name
        for name in PARTS
        if any(run.step_parts[name] >= SHARE_SHOWN * sum(run.step_parts.values()) for run in timed)
    ]


def _legend_rows(shown: Sequence[str]) -> list[list[tuple[float, str, str]]]:
    """Place, text and colour of each entry, in as many rows as they take."""
    rows: list[list[tuple[float, str, str]]] = [[]]
    x = float(MARGIN)
    for words, colour in [PARTS[name] for name in shown] + [REST]:
        width = 18 + CHARACTER_WIDTH * len(words) + 16
        if x + width > WIDTH and rows[-1]:
            rows.append([])
            x = float(MARGIN)
        rows[-1].append((x, words, colour))
        x += width
    return rows


def _legend(
    svg: ElementTree.Element, y: float, rows: Sequence[Sequence[tuple[float, str, str]]]
) -> None:
    for row in rows:
        for x, words, colour in row:
            _bar(svg, x, y - 10, 12, colour, height=12)
            _text(svg, x + 18, y, words)
        y += LEGEND_HEIGHT


def _row_texts(svg: ElementTree.Element, y: float, label: str, width: float, figure: str) -> None:
    _text(svg, MARGIN, y + 15.5, label)
    _text(svg, MARGIN + LABEL_WIDTH + width + 8, y + 15.5, figure)


def _bar(
    svg: ElementTree.Element,
    x: float,
    y: float,
    width: float,
    colour: str,
    height: float = BAR_HEIGHT,
) -> None:
    place = {"x": x, "y": y, "width": width, "height": height}
    attributes = {name: f"{value:.1f}" for name, value in place.items()}
    ElementTree.SubElement(svg, "rect", {**attributes, "rx": "2", "fill": colour})


def _text(svg: ElementTree.Element, x: float, y: float, words: str, style: str = "") -> None:
    attributes = {"x": f"{x:.1f}", "y": f"{y:.1f}"} | ({"class": style} if style else {})
    ElementTree.SubElement(svg, "text", attributes).text = words
