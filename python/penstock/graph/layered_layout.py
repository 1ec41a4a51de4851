# SPDX-License-Identifier: Apache-2.0
"""Places for the boxes of a graph in layers, from top to bottom, and ways for its edges.

The method is Sugiyama's: a layer for each box, points where long edges pass the layers between, an
order within each layer with few crossings, and places that keep the order and are near those of the
neighbours. Bands lie one below the other: no box of a band is above one of an earlier band.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

GAP = 28.0  # between boxes of a layer
PASSING_GAP = 14.0  # between edges that pass it
LAYER_GAP = 44.0
BAND_GAP = 72.0  # room for the frames of bands, and for what is written on edges between them
_ORDER_SWEEPS = 12
_PLACE_SWEEPS = 24
_PASSING_WEIGHT = 4.0  # long edges are straight where they can be
_LONE_WEIGHT = 0.01


@dataclass(frozen=True, slots=True)
class Box:
    width: float
    height: float
    band: int


@dataclass(frozen=True, slots=True)
class Layout:
    centres: list[tuple[float, float]]  # of the boxes
    routes: list[list[tuple[float, float]]]  # of the edges, from the one box's edge to the other's
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
    """``edges`` are pairs of numbers of boxes. One that leads to an earlier band, or to an earlier
    box of the same band, is drawn upwards."""
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
        # What reads nothing of its band stands right above what reads it.
        for number in reversed(members):
            readers = [layers[one] for one in below[number] if boxes[one].band == band]
            if readers and not any(boxes[one].band == band for one in above[number]):
                layers[number] = max(layers[number], min(readers) - 1)
        first = max(layers[number] for number in members) + 1
    return layers


def _path(cells: list[_Cell], source: int, target: int) -> list[int]:
    """Makes the points where an edge passes layers. Returns the cells from end to end."""
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
    """The cells of each layer from left to right, with few crossings of edges."""
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
    """All cells, in the order in which one comes to them from the top, downwards first."""
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
    """Gives each cell its x: near the mean of its neighbours, and apart from those of its layer."""
    for layer in layers:
        x = 0.0
        for place, number in enumerate(layer):
            x += _distance(cells, layer, place)
            cells[number].x = x
    for sweep in range(_PLACE_SWEEPS):
        is_down = sweep % 2 == 0
        for layer in layers if is_down else reversed(layers):
            wishes = [_wish(cells, layer, place, is_down) for place in range(len(layer))]
            _settle(cells, layer, wishes)
    left = min((cell.x - cell.width / 2 for cell in cells), default=0.0)
    for cell in cells:
        cell.x -= left


def _wish(
    cells: Sequence[_Cell], layer: Sequence[int], place: int, is_down: bool
) -> tuple[float, float]:
    """Where a cell would best stand, and how much that matters."""
    cell = cells[layer[place]]
    near = (cell.above if is_down else cell.below) or (cell.above + cell.below)
    if near:
        mean = sum(cells[one].x for one in near) / len(near)
        return mean, 1.0 if cell.is_box else _PASSING_WEIGHT
    beside = cells[layer[place - 1]] if place > 0 else cell  # without an edge: close to another
    return beside.x, _LONE_WEIGHT


def _distance(cells: Sequence[_Cell], layer: Sequence[int], place: int) -> float:
    """From the centre of the cell before, at least."""
    if place == 0:
        return 0.0
    before, own = cells[layer[place - 1]], cells[layer[place]]
    gap = GAP if before.is_box and own.is_box else PASSING_GAP
    return before.width / 2 + gap + own.width / 2


def _settle(
    cells: Sequence[_Cell], layer: Sequence[int], wishes: Sequence[tuple[float, float]]
) -> None:
    """Puts the cells of a layer where the weighted squares of their distances from their wishes are
    least, with their order and their distances kept: neighbours that would come too near form a
    block, which stands at the mean of its wishes."""
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
    """The top and the bottom of each layer."""
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
