# SPDX-License-Identifier: Apache-2.0
"""Group the calls of a plan, and the tensors between them, so that they fit into a picture.

In a small plan, each call is a separate group. In a larger plan, two kinds of calls that have to
stay (no cut could move them) are merged: chains, in which each call is read by the next one only,
and parallel calls that do the same. If that is not enough, all calls that have to stay are merged
wherever they are consecutive. Then the other calls are merged in the same ways, and finally a few
at a time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from penstock.graph.plan_record import PlannedCall, PlannedEdge, PlanRecord, shorten

# The plan's decision for a call. "cheaper" calls could move, but stay because of their price.
Role = Literal["moved", "cheaper", "stays", "both"]

_ROLES: frozenset[Role] = frozenset(("moved", "cheaper", "stays", "both"))

SMALL_MAX = 40  # calls that each have a separate group
GROUPS_MAX = 60
LINKS_MAX = 150
_BESIDE_MIN = 4  # parallel calls, or tensors of the batch, that are merged into one group
_COULD_MOVE = "it could move"  # prefix of the reasons of such calls


@dataclass(frozen=True, slots=True)
class CallGroup:
    """Calls in the order of the program, or tensors of the batch, or the result of forward."""

    calls: tuple[PlannedCall, ...] = ()
    role: Role | None = None  # role of its calls
    leaves: tuple[int, ...] = ()  # numbers of tensors of the batch
    beside: int = 1  # number of parallel equal members in the group


@dataclass(frozen=True, slots=True)
class GroupLink:
    source: int  # group number
    target: int
    tensor_bytes: int
    crosses: bool  # from the workers, or from the unchanged batch, to the trainer


def role_of(call: PlannedCall) -> Role:
    if call.place == "worker":
        return "moved"
    if call.place == "both":
        return "both"
    return "cheaper" if call.reason.startswith(_COULD_MOVE) else "stays"


def group_calls(plan: PlanRecord) -> tuple[list[CallGroup], list[GroupLink]]:
    """Return the groups in program order: tensors of the batch first, the result last."""
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
    """A partition of the nodes into groups. A group is named after its first node."""

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
        """Return for each group the groups that it reads and the groups that read it."""
        above: dict[_Node, list[_Node]] = {node: [] for node in self._members}
        below: dict[_Node, list[_Node]] = {node: [] for node in self._members}
        for source, target in sorted(self._pairs(), key=lambda pair: (pair[0][1], pair[1][1])):
            above[target].append(source)
            below[source].append(target)
        return above, below

    def _join(self, groups: Sequence[_Node]) -> None:
        """Merge several groups into one, which takes the position of the first."""
        first = groups[0]
        for other in groups[1:]:
            moved = self._members.pop(other)
            self._members[first] += moved
            for node in moved:
                self._home[node] = first
        self._members[first].sort(key=lambda node: node[1])

    def join_leaves(self) -> None:
        """Merge the tensors of the batch if there are many."""
        leaves = [node for node in self._members if node[0] == "leaf"]
        if len(leaves) >= _BESIDE_MIN:
            self._join(leaves)

    def join_chains(self, roles: Set[Role]) -> None:
        """Merge chains of calls of the ``roles``.

        In a chain, each call is read by the next call only, and the next call reads no other.
        """
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
        """Merge groups of equal calls that read the same groups and have the same readers."""
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
        """Merge groups of the ``roles`` that are consecutive in a topological order.

        In such an order, every group follows the groups that it reads, so merging creates no cycle
        in the picture. The order stays with the current role for as long as possible.
        """
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
        # Calls that write to the same memory are one call, which may read a result of its readers.
        # Such a back edge is ignored.
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
    """Return the names of a group's calls, or the first and the last name, and their number."""
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
    """Return the source lines of calls: "model.py:14", "model.py:14-20", "model.py, layers.py"."""
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
