# SPDX-License-Identifier: Apache-2.0
"""The calls of a plan in as few groups as a picture has room for, and the tensors between them.

A small plan has a group for each call. In a larger one, calls that have to stay, which no cut could
move, become one group where each is read by the next alone, and so do calls that do the same beside
each other. If that is not enough, all calls that have to stay become one group wherever they follow
each other. Then the other calls are joined in the same ways, and at last a few at a time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from penstock.graph.plan_record import PlannedCall, PlannedEdge, PlanRecord, shorten

# What a plan does with a call: "cheaper" ones could move, but stay for their price.
Role = Literal["moved", "cheaper", "stays", "both"]

_ROLES: frozenset[Role] = frozenset(("moved", "cheaper", "stays", "both"))

SMALL_MAX = 40  # calls that each have a group of their own
GROUPS_MAX = 60
LINKS_MAX = 150
_BESIDE_MIN = 4  # calls, or tensors of the batch, that become one beside each other
_COULD_MOVE = "it could move"  # how the reasons of such calls begin


@dataclass(frozen=True, slots=True)
class CallGroup:
    """Calls in the order of the program, or tensors of the batch, or the result of forward."""

    calls: tuple[PlannedCall, ...] = ()
    role: Role | None = None  # of its calls
    leaves: tuple[int, ...] = ()  # numbers of tensors of the batch
    beside: int = 1  # how many alike stand beside each other in it


@dataclass(frozen=True, slots=True)
class GroupLink:
    source: int  # a number of a group
    target: int
    tensor_bytes: int
    crosses: bool  # from the workers, or from the batch as it is, to the trainer


def role_of(call: PlannedCall) -> Role:
    if call.place == "worker":
        return "moved"
    if call.place == "both":
        return "both"
    return "cheaper" if call.reason.startswith(_COULD_MOVE) else "stays"


def group_calls(plan: PlanRecord) -> tuple[list[CallGroup], list[GroupLink]]:
    """The groups in the order of the program: tensors of the batch first, the result last."""
    grouping = _Grouping(plan)
    if grouping.call_count > SMALL_MAX:
        grouping.join_chains({"stays"})
        grouping.join_alike({"stays"})
    if not grouping.is_small_enough():
        grouping.join_runs({"stays"})
    if not grouping.is_small_enough():
        grouping.join_leaves()
        grouping.join_chains(_ROLES)
        grouping.join_alike(_ROLES)
    size = 2
    while not grouping.is_small_enough() and size <= grouping.call_count:
        grouping.join_runs(_ROLES, size)
        size *= 2
    return grouping.groups(), grouping.links()


_Node = tuple[str, int]  # ("leaf", number), ("call", index) or ("result", 0)


class _Grouping:
    """Who is in one group with whom. A group is named by its first node."""

    def __init__(self, plan: PlanRecord) -> None:
        self._calls = {call.index: call for call in (*plan.moved, *plan.kept)}
        self._edges = plan.edges
        leaves = sorted({edge.leaf for edge in plan.edges if edge.leaf is not None})
        self._nodes: list[_Node] = [("leaf", leaf) for leaf in leaves]
        self._nodes += [("call", index) for index in sorted(self._calls)]
        if any(edge.target is None for edge in plan.edges):
            self._nodes.append(("result", 0))
        self._members: dict[_Node, list[_Node]] = {node: [node] for node in self._nodes}
        self._home: dict[_Node, _Node] = {node: node for node in self._nodes}
        self._beside: dict[_Node, int] = {}

    @property
    def call_count(self) -> int:
        return len(self._calls)

    def is_small_enough(self) -> bool:
        return len(self._members) <= GROUPS_MAX and len(self._pairs()) <= LINKS_MAX

    def groups(self) -> list[CallGroup]:
        found = []
        for first, members in self._members.items():
            calls = tuple(self._calls[number] for kind, number in members if kind == "call")
            leaves = tuple(number for kind, number in members if kind == "leaf")
            beside = self._beside.get(first, 1)
            found.append(CallGroup(calls, self._role(first), leaves, beside))
        return found

    def links(self) -> list[GroupLink]:
        numbers = {first: number for number, first in enumerate(self._members)}
        # A tensor that several calls of a group read is counted once.
        bytes_of: dict[tuple[_Node, _Node], dict[_Node, int]] = {}
        for edge in self._edges:
            source, target = _ends(edge)
            pair = self._home[source], self._home[target]
            if pair[0] != pair[1]:
                tensors = bytes_of.setdefault(pair, {})
                tensors[source] = max(tensors.get(source, 0), edge.tensor_bytes)
        return [
            GroupLink(numbers[a], numbers[b], sum(tensors.values()), self._crosses(a, b))
            for (a, b), tensors in bytes_of.items()
        ]

    def _crosses(self, source: _Node, target: _Node) -> bool:
        is_made_there = source[0] == "leaf" or self._role(source) == "moved"
        is_read_here = target[0] == "result" or self._role(target) in ("cheaper", "stays")
        return is_made_there and is_read_here

    def _role(self, node: _Node) -> Role | None:
        return role_of(self._calls[node[1]]) if node[0] == "call" else None

    def _pairs(self) -> set[tuple[_Node, _Node]]:
        ends = (_ends(edge) for edge in self._edges)
        pairs = {(self._home[source], self._home[target]) for source, target in ends}
        return {(source, target) for source, target in pairs if source != target}

    def _neighbours(self) -> tuple[dict[_Node, list[_Node]], dict[_Node, list[_Node]]]:
        """Of each group, those that it reads and those that read it."""
        above: dict[_Node, list[_Node]] = {node: [] for node in self._members}
        below: dict[_Node, list[_Node]] = {node: [] for node in self._members}
        for source, target in sorted(self._pairs(), key=lambda pair: (pair[0][1], pair[1][1])):
            above[target].append(source)
            below[source].append(target)
        return above, below

    def _join(self, groups: Sequence[_Node]) -> None:
        """Makes one group of several; it takes the place of the first."""
        first = groups[0]
        for other in groups[1:]:
            moved = self._members.pop(other)
            self._members[first] += moved
            for node in moved:
                self._home[node] = first
        self._members[first].sort(key=lambda node: node[1])

    def join_leaves(self) -> None:
        """Joins the tensors of the batch where there are many."""
        leaves = [node for node in self._members if node[0] == "leaf"]
        if len(leaves) >= _BESIDE_MIN:
            self._join(leaves)

    def join_chains(self, roles: Set[Role]) -> None:
        """Joins calls of one of the ``roles`` of which each is read by the next alone and reads it
        alone."""
        above, below = self._neighbours()
        for node in self._nodes:
            readers = below.get(node, [])
            if self._role(node) not in roles or len(readers) != 1:
                continue
            (reader,) = readers
            is_chain = self._role(reader) == self._role(node) and len(above[reader]) == 1
            homes = [self._home[node], self._home[reader]]
            if is_chain and homes[0] != homes[1]:
                self._join(homes)

    def join_alike(self, roles: Set[Role]) -> None:
        """Joins groups that are made of the same calls, read the same groups and are read by the
        same."""
        while True:
            above, below = self._neighbours()
            alike: dict[Hashable, list[_Node]] = {}
            for node, members in self._members.items():
                if self._role(node) in roles:
                    names = tuple(_name(self._calls[number]) for _, number in members)
                    key = (self._role(node), names, tuple(above[node]), tuple(below[node]))
                    alike.setdefault(key, []).append(node)
            many = [nodes for nodes in alike.values() if len(nodes) >= _BESIDE_MIN]
            if not many:
                return
            for nodes in many:
                self._join(nodes)
                self._beside[nodes[0]] = len(nodes)

    def join_runs(self, roles: Set[Role], size_max: int | None = None) -> None:
        """Joins groups of one of the ``roles`` that follow each other in an order in which every
        group comes after those that it reads, so that the picture has no circle for it. The order
        goes on with the role that it is at for as long as it can."""
        order = self._in_order()
        runs: list[list[_Node]] = []
        for node in order:
            role = self._role(node)
            is_full = size_max is not None and runs and len(runs[-1]) >= size_max
            if runs and role in roles and role == self._role(runs[-1][0]) and not is_full:
                runs[-1].append(node)
            else:
                runs.append([node])
        for run in runs:
            if len(run) > 1:
                self._join(run)
                self._beside.pop(run[0], None)
        kinds = ["leaf", "call", "result"]
        firsts = sorted((run[0] for run in runs), key=lambda node: kinds.index(node[0]))
        self._members = {first: self._members[first] for first in firsts}

    def _in_order(self) -> list[_Node]:
        above, below = self._neighbours()
        places = {node: place for place, node in enumerate(self._members)}
        # Calls that write to the same memory are one call, which may read what reads it. Such a way
        # back does not count.
        waits = {node: {a for a in above[node] if places[a] < places[node]} for node in above}
        ready = [node for node in self._members if not waits[node]]
        order: list[_Node] = []
        while ready:
            role = self._role(order[-1]) if order else None
            node = min(ready, key=lambda one: (self._role(one) != role, places[one]))
            ready.remove(node)
            order.append(node)
            for reader in below[node]:
                if node in waits[reader]:
                    waits[reader].remove(node)
                    if not waits[reader]:
                        ready.append(reader)
        return order


def _ends(edge: PlannedEdge) -> tuple[_Node, _Node]:
    source = ("leaf", edge.leaf or 0) if edge.source is None else ("call", edge.source)
    target = ("result", 0) if edge.target is None else ("call", edge.target)
    return source, target


def _name(call: PlannedCall) -> str:
    return call.operator.rpartition(" at ")[0] or call.operator


def title_of(group: CallGroup, characters_max: int) -> str:
    """The names of a group's calls, or of the first and the last, and how many they are."""
    names = [_name(call) for call in group.calls]
    count = len(names) // group.beside
    if count == 1:
        title = names[0]
    elif count <= 3:
        title = ", ".join(names[:: group.beside][:count])
    else:
        title = f"{names[0]} … {names[-1]}"
    title = shorten(title, characters_max)
    if group.beside > 1:
        return f"{title} ×{group.beside}"
    return f"{title} ({count})" if count > 1 else title


def shared_places(calls: Iterable[PlannedCall]) -> str:
    """Where calls are in the program: "model.py:14", "model.py:14-20", "model.py, layers.py"."""
    lines: dict[str, list[int]] = {}
    for call in calls:
        file, _, line = call.operator.rpartition(" at ")[2].rpartition(":")
        if file and line.isdecimal():
            lines.setdefault(file, []).append(int(line))
    spans = [
        f"{file}:{min(numbers)}" + (f"-{max(numbers)}" if len({*numbers}) > 1 else "")
        for file, numbers in lines.items()
    ]
    return spans[0] if len(spans) == 1 else ", ".join(lines)
