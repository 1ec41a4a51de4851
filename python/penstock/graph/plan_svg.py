# SPDX-License-Identifier: Apache-2.0
"""Draw a plan as an SVG picture, and lay out its boxes.

The file is self-contained. Its colours follow the reader's setting, light or dark; viewers without
such a setting show the light ones. Hovering over a box shows its call, where it runs, and why.

Boxes are arranged in layers, from top to bottom, by Sugiyama's method: a layer for each box, dummy
points where long edges pass intermediate layers, an order within each layer with few crossings, and
positions that keep the order and are near the neighbours' positions. Bands lie one below the other:
no box of a band is above a box of an earlier band.
"""

from __future__ import annotations

import bisect
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from penstock.graph.call_groups import CallGroup, GroupLink, group_calls, shared_places, title_of
from penstock.graph.plan_record import (
    CUT_NAMES,
    NumberedReasons,
    PlannedCall,
    PlanRecord,
    shorten,
    verdict,
)

_CHARACTER = 7.3  # width of a character in a monospace font
_LINE = 16.0
_MARGIN = 24.0
_FRAME = 26.0  # from a frame to its content
_HEAD_COLUMNS = 84
_TEXT_MAX = 30  # characters of a line in a box
_TOOLTIP_CALLS_MAX = 24
_TOOLTIP_REASONS_MAX = 6
_LABELS_MAX = 16  # labels of crossing edges; more would hide each other

# Tensors of the batch, values that both sides compute, the workers, the trainer, the result.
_BATCH, _BOTH, _WORKERS, _TRAINER, _RESULT = range(5)
_BAND = {"both": _BOTH, "moved": _WORKERS, "cheaper": _TRAINER, "stays": _TRAINER}
_LEGEND = {
    "moved": "runs in the workers",
    "cheaper": "could move, cheaper in the trainer",
    "stays": "must stay in the trainer",
    "both": "computed on both sides",
}
_STYLE = """\
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  fill: #1f2328 }
.page { fill: #ffffff } .head { font-weight: bold } .quiet, .place { fill: #59636e }
.quiet, .bytes { stroke: #ffffff; stroke-width: 4; paint-order: stroke } .place { font-size: 11px } .frame { fill: none; stroke: #8c959f; stroke-dasharray: 2 3 }
.box { stroke-width: 1.2 } .moved { fill: #d5f0dc; stroke: #2da44e }
.cheaper { fill: #fdf0c8; stroke: #bf8700 } .stays { fill: #eceff2; stroke: #8c959f }
.both { fill: #ffffff; stroke: #8c959f; stroke-dasharray: 4 3 }
.end { fill: #ddf0ff; stroke: #3b8bd6 }
.edge { fill: none; stroke: #8c959f; stroke-width: 1.2 } .crossing { stroke: #cf4a22; stroke-width: 2.4 }
.reach { fill: none; stroke: transparent; stroke-width: 9 }
.bytes { fill: #a8330f }
#tip path { fill: #8c959f } #crossing-tip path { fill: #cf4a22 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .page { fill: #0d1117 } .quiet, .place { fill: #9198a1 }
  .moved { fill: #12361f } .cheaper { fill: #3d2f06 } .stays { fill: #22272e } .both { fill: #0d1117 }
  .end { fill: #0c2d4a } .crossing { stroke: #f0763f } .bytes { fill: #ffa27a }
  .quiet, .bytes { stroke: #0d1117 }
  #crossing-tip path { fill: #f0763f }
}"""  # noqa: E501

GAP = 28.0  # between boxes of a layer
PASSING_GAP = 14.0  # between edges that pass it
LAYER_GAP = 44.0
BAND_GAP = 72.0  # room for the frames of bands, and for the labels of edges between them
_ORDER_SWEEPS = 12
_PLACE_SWEEPS = 24
_PASSING_WEIGHT = 4.0  # long edges are straight where possible
_LONE_WEIGHT = 0.01


def format_svg(plan: PlanRecord) -> str:
    """Return the plan as SVG.

    Calls are boxes with their time, tensors are edges; edges that cross the cut are thick and
    labelled with their bytes. In a large plan, several calls share a box. A plan that was refused
    is drawn as the sentence with the reason.
    """
    if plan.refused is not None:
        verdict_lines = _wrapped(f"no call moves: {plan.refused}")
        return _picture(verdict_lines, [], [], _HEAD_COLUMNS * _CHARACTER, 0.0)
    groups, links = group_calls(plan)
    texts = [_lines(group) for group in groups]
    boxes = [
        _box(group, lines, band)
        for group, lines, band in zip(groups, texts, _bands(groups, links), strict=True)
    ]
    layout = lay_out(boxes, [(link.source, link.target) for link in links])
    frames, titles = _frames(plan, boxes, layout)
    drawn = [*frames]
    for link, route in zip(links, layout.routes, strict=True):
        drawn.append(_edge(groups, link, route))
    for group, lines, box, centre in zip(groups, texts, boxes, layout.centres, strict=True):
        drawn.append(_node(group, lines, box, centre))
    drawn += [*titles, *_byte_labels(links, layout)]
    bottom = layout.height + _FRAME + _LINE
    roles = {group.role for group in groups}
    drawn += _legend([role for role in _LEGEND if role in roles], bottom)
    width = max(layout.width + 2 * _FRAME, _HEAD_COLUMNS * _CHARACTER)
    return _picture(
        _wrapped(verdict(plan)), _costs(plan), drawn, width, bottom + _LINE * len(roles - {None})
    )


def _costs(plan: PlanRecord) -> list[str]:
    return [
        f"{CUT_NAMES[item.cut]}: the trainer reads {_bytes(item.boundary_bytes)} per batch"
        for item in plan.totals
    ]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _HEAD_COLUMNS, break_on_hyphens=False)


def _bands(groups: Sequence[CallGroup], links: Sequence[GroupLink]) -> list[int]:
    bands = [
        _BAND[group.role] if group.role else (_BATCH if group.leaves else _RESULT)
        for group in groups
    ]
    for link in links:  # computations of both sides on a worker's value are drawn below it
        if groups[link.target].role == "both":
            bands[link.target] = max(bands[link.target], bands[link.source])
    return bands


def _lines(group: CallGroup) -> list[str]:
    """Return the lines in the box."""
    if group.leaves:
        if len(group.leaves) == 1:
            return [f"tensor {group.leaves[0]} of the batch"]
        return [f"{len(group.leaves)} tensors of the batch"]
    if not group.calls:
        return ["result of forward"]
    seconds = sum(_seconds(call) for call in group.calls)
    below = [shorten(shared_places(group.calls), _TEXT_MAX)]
    below += [f"{seconds * 1e3:.3f} ms"] if seconds else []
    return [title_of(group, _TEXT_MAX), " · ".join(filter(None, below))]


def _seconds(call: PlannedCall) -> float:
    return call.worker_s if call.place == "worker" else call.trainer_s


def _box(group: CallGroup, lines: Sequence[str], band: int) -> Box:
    width = max(len(line) for line in lines) * _CHARACTER + 20
    return Box(width, _LINE * len(lines) + (10 if group.calls else 14), band)


def _frames(plan: PlanRecord, boxes: Sequence[Box], layout: Layout) -> tuple[list[str], list[str]]:
    """Return the frames around the workers' and the trainer's calls, and the titles, drawn last."""
    spent = f": {plan.trainer_s * 1e3:.3f} ms per batch on movable calls"
    names = {
        _WORKERS: f"workers: {plan.worker_s * 1e3:.3f} ms per batch",
        _TRAINER: "trainer" + (spent if plan.trainer_s else ""),
    }
    frames, titles = [], []
    for band, name in names.items():
        members = [
            (box, centre)
            for box, centre in zip(boxes, layout.centres, strict=True)
            if box.band == band
        ]
        if not members:
            continue
        left = min(x - box.width / 2 for box, (x, _) in members) - _FRAME / 2
        right = max(x + box.width / 2 for box, (x, _) in members) + _FRAME / 2
        top = min(y - box.height / 2 for box, (_, y) in members) - _FRAME
        bottom = max(y + box.height / 2 for box, (_, y) in members) + _FRAME / 2
        right = max(right, left + len(name) * _CHARACTER + 20)
        frames.append(
            f'<rect class="frame" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
            f'height="{bottom - top:.1f}" rx="8"/>'
        )
        titles.append(_text(left + 10, top + 16, name, "quiet"))
    return frames, titles


def _edge(
    groups: Sequence[CallGroup], link: GroupLink, route: Sequence[tuple[float, float]]
) -> str:
    way = f"M{route[0][0]:.1f} {route[0][1]:.1f}"
    for (x, y), (next_x, next_y) in zip(route, route[1:], strict=False):
        if x == next_x:
            way += f"L{next_x:.1f} {next_y:.1f}"
        else:
            middle = (y + next_y) / 2
            way += f"C{x:.1f} {middle:.1f} {next_x:.1f} {middle:.1f} {next_x:.1f} {next_y:.1f}"
    kind, tip = ("edge crossing", "crossing-tip") if link.crosses else ("edge", "tip")
    ends = " → ".join(_lines(groups[number])[0] for number in (link.source, link.target))
    tooltip = f"{ends}\n{link.tensor_bytes:,} bytes per batch"
    if link.crosses:
        tooltip += ", from the workers to the trainer"
    return (
        f'<g>{_title(tooltip)}<path class="{kind}" d="{way}" marker-end="url(#{tip})"/>'
        f'<path class="reach" d="{way}"/></g>'
    )


def _node(group: CallGroup, lines: Sequence[str], box: Box, centre: tuple[float, float]) -> str:
    x, y = centre
    left, top = x - box.width / 2, y - box.height / 2
    radius = 5.0 if group.calls else box.height / 2
    kind = group.role or "end"
    texts = [
        _text(x, y + _LINE * (number - len(lines) / 2) + 12, line, kind, "middle")
        for number, line, kind in zip(range(len(lines)), lines, ("", "place"), strict=False)
    ]
    behind = ""
    if group.beside > 1:  # several equal members, one behind the other
        behind = _rectangle(f"box {kind}", left + 4, top + 4, box, radius)
    return (
        f"<g>{_title(_tooltip(group))}{behind}{_rectangle(f'box {kind}', left, top, box, radius)}"
        f"{''.join(texts)}</g>"
    )


def _rectangle(kind: str, left: float, top: float, box: Box, radius: float) -> str:
    return (
        f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" width="{box.width:.1f}" '
        f'height="{box.height:.1f}" rx="{radius:.1f}"/>'
    )


def _tooltip(group: CallGroup) -> str:
    """Return the tooltip of a box."""
    if group.leaves:
        return f"tensors of the batch: {', '.join(map(str, group.leaves))}"
    if not group.calls or group.role is None:
        return "the result of forward"
    lines = []
    for call in group.calls[:_TOOLTIP_CALLS_MAX]:
        seconds = _seconds(call)
        lines.append(call.operator + (f", {seconds * 1e3:.3f} ms" if seconds else ""))
    if len(group.calls) > _TOOLTIP_CALLS_MAX:
        lines.append(f"and {len(group.calls) - _TOOLTIP_CALLS_MAX} more calls")
    reasons = NumberedReasons(group.calls).sentences()
    lines += ["", f"{_LEGEND[group.role]}:", *reasons[:_TOOLTIP_REASONS_MAX]]
    if len(reasons) > _TOOLTIP_REASONS_MAX:
        lines.append(f"and {len(reasons) - _TOOLTIP_REASONS_MAX} more reasons")
    return "\n".join(lines)


def _byte_labels(links: Sequence[GroupLink], layout: Layout) -> Iterable[str]:
    """Yield the byte labels of edges that cross, each near the end of its edge."""
    crossing = [
        (link, route) for link, route in zip(links, layout.routes, strict=True) if link.crosses
    ]
    if len(crossing) > _LABELS_MAX:
        return
    for link, route in crossing:
        (x, y), (end_x, end_y) = route[-2], route[-1]
        middle = (y + end_y) / 2 if end_y - y < BAND_GAP else end_y - BAND_GAP / 2
        yield _text((x + end_x) / 2, middle + 4, _bytes(link.tensor_bytes), "bytes", "middle")


def _legend(roles: Sequence[str], top: float) -> Iterable[str]:
    for number, role in enumerate(roles):
        y = top + number * _LINE
        yield f'<rect class="box {role}" x="0" y="{y:.1f}" width="20" height="11" rx="3"/>'
        yield _text(28, y + 10, _LEGEND[role], "quiet")


def _picture(
    verdict_lines: Sequence[str],
    costs: Sequence[str],
    drawn: Iterable[str],
    width: float,
    height: float,
) -> str:
    """Return the picture with the text above the drawing."""
    head = [*verdict_lines, *costs]
    head_height = _LINE * len(head) + (_FRAME + _LINE if height else 0)
    full_width, full_height = width + 2 * _MARGIN, height + head_height + 2 * _MARGIN
    heads = [
        _text(0, _LINE * (number + 0.75), line, "head" if number < len(verdict_lines) else "")
        for number, line in enumerate(head)
    ]
    tips = [
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z"/></marker>'
        for name in ("tip", "crossing-tip")
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{full_width:.0f}" '
            f'height="{full_height:.0f}" viewBox="0 0 {full_width:.0f} {full_height:.0f}" '
            f'role="img" aria-label="{_escaped(" ".join(verdict_lines))}">',
            f"<style>{_STYLE}</style>",
            f"<defs>{''.join(tips)}</defs>",
            '<rect class="page" width="100%" height="100%"/>',
            f'<g transform="translate({_MARGIN:.0f} {_MARGIN:.0f})">',
            *heads,
            f'<g transform="translate(0 {head_height:.1f})">',
            *drawn,
            "</g></g></svg>",
        ]
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{name}>{_escaped(text)}</text>'


def _title(text: str) -> str:
    return f"<title>{_escaped(text)}</title>"


def _escaped(text: str) -> str:
    """Escape for XML; most control characters have no XML form, so their codes are shown."""
    shown = "".join(
        one if one.isprintable() or one in "\n\t" else f"\\x{ord(one):02x}" for one in text
    )
    return escape(shown)


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


@dataclass(frozen=True, slots=True)
class Box:
    width: float
    height: float
    band: int


@dataclass(frozen=True, slots=True)
class Layout:
    centres: list[tuple[float, float]]  # centres of the boxes
    routes: list[list[tuple[float, float]]]  # edges, from border to border of their boxes
    width: float
    height: float


@dataclass(slots=True)
class _Cell:
    """A box in its layer, or the point where a long edge passes the layer."""

    layer: int
    width: float
    height: float
    is_box: bool
    x: float = 0.0
    above: list[int] = field(default_factory=list)
    below: list[int] = field(default_factory=list)


def lay_out(boxes: Sequence[Box], edges: Sequence[tuple[int, int]]) -> Layout:
    """Lay out boxes in layers.

    ``edges`` are pairs of box numbers. An edge to an earlier band, or to an earlier box of the same
    band, is drawn upwards.
    """
    downward = [_downward(boxes, edge) for edge in edges]
    layers_of = _layers(boxes, downward)
    cells = [
        _Cell(layer, box.width, box.height, True)
        for layer, box in zip(layers_of, boxes, strict=True)
    ]
    paths = [_path(cells, source, target) for source, target in downward]
    layers = _ordered(cells)
    _place(cells, layers)
    tops, bottoms = _heights(boxes, cells, layers)

    def y_of(cell: _Cell) -> float:
        return (tops[cell.layer] + bottoms[cell.layer]) / 2

    routes = []
    for path, edge, way in zip(paths, edges, downward, strict=True):
        first, last = cells[path[0]], cells[path[-1]]
        points = [(first.x, y_of(first) + first.height / 2)]
        for number in path[1:-1]:
            cell = cells[number]
            points += [(cell.x, tops[cell.layer]), (cell.x, bottoms[cell.layer])]
        points.append((last.x, y_of(last) - last.height / 2))
        routes.append(points if edge == way else points[::-1])
    return Layout(
        [(cell.x, y_of(cell)) for cell in cells[: len(boxes)]],
        routes,
        max((cell.x + cell.width / 2 for cell in cells), default=0.0),
        bottoms[-1] if bottoms else 0.0,
    )


def _downward(boxes: Sequence[Box], edge: tuple[int, int]) -> tuple[int, int]:
    source, target = edge
    is_upward = (boxes[source].band, source) > (boxes[target].band, target)
    return (target, source) if is_upward else edge


def _layers(boxes: Sequence[Box], edges: Sequence[tuple[int, int]]) -> list[int]:
    above: list[list[int]] = [[] for _ in boxes]
    below: list[list[int]] = [[] for _ in boxes]
    for source, target in edges:
        above[target].append(source)
        below[source].append(target)
    layers = [0] * len(boxes)
    first = 0
    for band in sorted({box.band for box in boxes}):
        members = [number for number, box in enumerate(boxes) if box.band == band]
        for number in members:
            layers[number] = max([first, *(layers[one] + 1 for one in above[number])])
        # A box that reads no box of its band is directly above its reader.
        for number in reversed(members):
            readers = [layers[one] for one in below[number] if boxes[one].band == band]
            if readers and not any(boxes[one].band == band for one in above[number]):
                layers[number] = max(layers[number], min(readers) - 1)
        first = max(layers[number] for number in members) + 1
    return layers


def _path(cells: list[_Cell], source: int, target: int) -> list[int]:
    """Create the points where an edge passes layers. Return the cells from end to end."""
    path = [source]
    for layer in range(cells[source].layer + 1, cells[target].layer):
        cells.append(_Cell(layer, 0.0, 0.0, False))
        path.append(len(cells) - 1)
    path.append(target)
    for upper, lower in zip(path, path[1:], strict=False):
        cells[upper].below.append(lower)
        cells[lower].above.append(upper)
    return path


def _ordered(cells: Sequence[_Cell]) -> list[list[int]]:
    """Return the cells of each layer from left to right, with few crossings of edges."""
    layers: list[list[int]] = [[] for _ in range(1 + max((c.layer for c in cells), default=-1))]
    for number in _first_visits(cells):
        layers[cells[number].layer].append(number)
    best, fewest = [list(layer) for layer in layers], _crossings(cells, layers)
    for sweep in range(_ORDER_SWEEPS):
        if fewest == 0:
            break
        is_down = sweep % 2 == 0
        for layer in layers if is_down else reversed(layers):
            _sort_by_neighbours(cells, layers, layer, is_down)
        count = _crossings(cells, layers)
        if count < fewest:
            best, fewest = [list(layer) for layer in layers], count
    return best


def _first_visits(cells: Sequence[_Cell]) -> list[int]:
    """Return all cells in depth-first order, downwards from the topmost cells."""
    seen: dict[int, None] = {}
    roots = sorted(range(len(cells)), key=lambda number: cells[number].layer)
    for root in roots:
        stack = [root]
        while stack:
            number = stack.pop()
            if number not in seen:
                seen[number] = None
                stack += reversed(cells[number].below)
    return list(seen)


def _sort_by_neighbours(
    cells: Sequence[_Cell], layers: list[list[int]], layer: list[int], is_down: bool
) -> None:
    if not layer:
        return
    beside = cells[layer[0]].layer + (-1 if is_down else 1)
    if not 0 <= beside < len(layers):
        return
    rank = {number: place for place, number in enumerate(layers[beside])}
    own = {number: place for place, number in enumerate(layer)}

    def wish(number: int) -> float:
        near = cells[number].above if is_down else cells[number].below
        return sum(rank[one] for one in near) / len(near) if near else float(own[number])

    layer.sort(key=wish)


def _crossings(cells: Sequence[_Cell], layers: Sequence[Sequence[int]]) -> int:
    total = 0
    for upper, lower in zip(layers, layers[1:], strict=False):
        rank = {number: place for place, number in enumerate(lower)}
        passed: list[int] = []
        for number in upper:
            ends = sorted(rank[one] for one in cells[number].below)
            total += sum(len(passed) - bisect.bisect_right(passed, end) for end in ends)
            for end in ends:
                bisect.insort(passed, end)
    return total


def _place(cells: Sequence[_Cell], layers: Sequence[Sequence[int]]) -> None:
    """Set each cell's x: near the mean of its neighbours, and apart from the cells of its layer."""
    for layer in layers:
        x = 0.0
        for place, number in enumerate(layer):
            x += _distance(cells, layer, place)
            cells[number].x = x
    for sweep in range(_PLACE_SWEEPS):
        is_down = sweep % 2 == 0
        for layer in layers if is_down else reversed(layers):
            wishes = [
                _preferred_position(cells, layer, place, is_down) for place in range(len(layer))
            ]
            _settle(cells, layer, wishes)
    left = min((cell.x - cell.width / 2 for cell in cells), default=0.0)
    for cell in cells:
        cell.x -= left


def _preferred_position(
    cells: Sequence[_Cell], layer: Sequence[int], place: int, is_down: bool
) -> tuple[float, float]:
    """Return the best position of a cell, and its weight."""
    cell = cells[layer[place]]
    near = (cell.above if is_down else cell.below) or (cell.above + cell.below)
    if near:
        mean = sum(cells[one].x for one in near) / len(near)
        return mean, 1.0 if cell.is_box else _PASSING_WEIGHT
    beside = cells[layer[place - 1]] if place > 0 else cell  # without an edge: close to another
    return beside.x, _LONE_WEIGHT


def _distance(cells: Sequence[_Cell], layer: Sequence[int], place: int) -> float:
    """Return the minimum distance from the centre of the previous cell."""
    if place == 0:
        return 0.0
    before, own = cells[layer[place - 1]], cells[layer[place]]
    gap = GAP if before.is_box and own.is_box else PASSING_GAP
    return before.width / 2 + gap + own.width / 2


def _settle(
    cells: Sequence[_Cell], layer: Sequence[int], wishes: Sequence[tuple[float, float]]
) -> None:
    """Place the cells of a layer near their wishes.

    The positions minimise the weighted squares of the distances from the wishes, and keep the order
    and the minimum distances: neighbours that would be too close form a block, which is placed at
    the mean of its wishes.
    """
    blocks: list[tuple[float, float, int]] = []  # sum of wishes, weight, count of cells
    offsets: list[float] = []
    for place, (wish, weight) in enumerate(wishes):
        offsets.append((offsets[-1] if offsets else 0.0) + _distance(cells, layer, place))
        block = (weight * (wish - offsets[place]), weight, 1)
        while blocks and blocks[-1][0] / blocks[-1][1] > block[0] / block[1]:
            before = blocks.pop()
            block = (before[0] + block[0], before[1] + block[1], before[2] + block[2])
        blocks.append(block)
    place = 0
    for total, weight, count in blocks:
        for _ in range(count):
            cells[layer[place]].x = total / weight + offsets[place]
            place += 1


def _heights(
    boxes: Sequence[Box], cells: Sequence[_Cell], layers: Sequence[Sequence[int]]
) -> tuple[list[float], list[float]]:
    """Return the top and the bottom of each layer."""
    bands = [max(boxes[n].band for n in layer if n < len(boxes)) for layer in layers]
    tops: list[float] = []
    bottoms: list[float] = []
    for layer, members in enumerate(layers):
        gap = 0.0
        if layer > 0:
            gap = LAYER_GAP if bands[layer] == bands[layer - 1] else BAND_GAP
        tops.append((bottoms[-1] if bottoms else 0.0) + gap)
        bottoms.append(tops[-1] + max(cells[number].height for number in members))
    return tops, bottoms
