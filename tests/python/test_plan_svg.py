# SPDX-License-Identifier: Apache-2.0
"""The picture of a plan: it contains every call, boxes do not overlap, and it stays small."""

from __future__ import annotations

import random
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from penstock.explanation.explanation import explain
from penstock.graph.call_groups import GROUPS_MAX, LINKS_MAX, group_calls, role_of
from penstock.graph.plan import Plan, PlannedCall, PlannedEdge
from penstock.graph.plan_record import verdict
from penstock.graph.plan_svg import Box, format_svg, lay_out

SVG = "{http://www.w3.org/2000/svg}"
ODD = "<script>&\"'\x00\x1b[2J at <m>.py:1"


def call_of(index: int, place: str, operator: str, reason: str = "because") -> PlannedCall:
    return PlannedCall(index, operator, place, reason, 1e-3, 1e-3, 4096)


def plan_of(calls: list[PlannedCall], edges: list[PlannedEdge]) -> Plan:
    return Plan(
        moved=tuple(call for call in calls if call.place == "worker"),
        kept=tuple(call for call in calls if call.place != "worker"),
        edges=tuple(edges),
    )


def random_plan(chance: random.Random, call_count: int) -> Plan:
    """Workers' calls are first in no program; here too the two are mixed. Some edges lead back, as
    where several calls write to the same memory."""
    calls, edges = [], []
    for index in range(call_count):
        place = chance.choices(["worker", "trainer", "both"], [3, 6, 1])[0]
        reason = chance.choice(
            ["it could move, but is cheaper in the trainer", "it reads a.weight"]
        )
        calls.append(call_of(index, place, f"op{chance.randrange(4)} at m.py:{index}", reason))
        is_worker = place == "worker"
        for _ in range(chance.randrange(4)):
            source = chance.randrange(index) if index and chance.random() < 0.9 else None
            if source is not None and is_worker and calls[source].place == "trainer":
                continue
            leaf = chance.randrange(5) if source is None else None
            edges.append(PlannedEdge(source, index, chance.randrange(1 << 20), leaf))
    if call_count > 3:
        edges.append(PlannedEdge(call_count - 1, call_count - 3, 8, None))
    edges.append(PlannedEdge(call_count - 1, None, 8, None))
    return plan_of(calls, edges)


@pytest.mark.parametrize("call_count", [1, 7, 40, 41, 200, 700])
def test_every_call_is_in_one_group_and_groups_are_few(seed: int, call_count: int) -> None:
    chance = random.Random(seed)
    for _ in range(2):
        plan = random_plan(chance, call_count)
        groups, links = group_calls(plan)
        grouped = [call for group in groups for call in group.calls]
        assert sorted(call.index for call in grouped) == list(range(call_count))
        assert all(role_of(call) == group.role for group in groups for call in group.calls)
        assert all(0 <= link.source != link.target < len(groups) for link in links)
        assert len({(link.source, link.target) for link in links}) == len(links)
        if call_count > 40:
            assert len(groups) <= GROUPS_MAX and len(links) <= LINKS_MAX
        else:
            assert all(len(group.calls) <= 1 for group in groups)
        ElementTree.fromstring(format_svg(plan))


def test_boxes_do_not_overlap_and_edges_meet_them(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(30):
        boxes = [
            Box(chance.uniform(40, 220), chance.uniform(20, 50), chance.randrange(4))
            for _ in range(chance.randrange(1, 40))
        ]
        numbers = range(len(boxes))
        pairs = [(a, b) for a in numbers for b in numbers if a != b]
        edges = [pair for pair in pairs if chance.random() < 1.5 / len(boxes)]
        layout = lay_out(boxes, edges)
        sides = [
            (x - box.width / 2, x + box.width / 2, y - box.height / 2, y + box.height / 2)
            for box, (x, y) in zip(boxes, layout.centres, strict=True)
        ]
        for a in numbers:
            left, right, top, bottom = sides[a]
            assert left > -0.01 and right < layout.width + 0.01
            assert top > -0.01 and bottom < layout.height + 0.01
            for b in range(a):
                other = sides[b]
                is_apart = right <= other[0] or other[1] <= left
                assert is_apart or bottom <= other[2] or other[3] <= top, (a, b)
                if boxes[a].band < boxes[b].band:
                    assert bottom < other[2]
        for (source, target), route in zip(edges, layout.routes, strict=True):
            for end, point in ((source, route[0]), (target, route[-1])):
                assert point[0] == layout.centres[end][0]
                assert point[1] in sides[end][2:]


def test_chain_is_laid_out_as_a_straight_line() -> None:
    layout = lay_out([Box(100, 40, 0)] * 6, [(i, i + 1) for i in range(5)])
    assert {x for x, _ in layout.centres} == {50.0}
    assert len({y for _, y in layout.centres}) == 6


def test_chain_of_kept_calls_shares_a_box() -> None:
    moved = [call_of(i, "worker", f"mul at m.py:{i}") for i in range(5)]
    kept = [call_of(i, "trainer", f"linear at m.py:{i}", "it reads a") for i in range(5, 60)]
    edges = [PlannedEdge(None, 0, 64, 0), *(PlannedEdge(i, i + 1, 64, None) for i in range(59))]
    groups, links = group_calls(plan_of([*moved, *kept], edges))
    assert [len(group.calls) for group in groups] == [0, 1, 1, 1, 1, 1, 55]
    assert [link.crosses for link in links] == [False] * 5 + [True]
    tree = ElementTree.fromstring(format_svg(plan_of([*moved, *kept], edges)))
    texts = ["".join(text.itertext()) for text in tree.iter(f"{SVG}text")]
    assert {"linear … linear (55)", "m.py:5-59 · 55.000 ms", "64 B"} <= {*texts}
    told = [title.text or "" for title in tree.iter(f"{SVG}title")]
    ending = "and 31 more calls\n\nmust stay in the trainer:\nit reads a"
    assert len([text for text in told if text.endswith(ending)]) == 1


def test_similar_neighbouring_calls_share_a_box() -> None:
    calls = [call_of(i, "trainer", "add_ at m.py:3", f"it reads bn{i}.count") for i in range(45)]
    groups, links = group_calls(plan_of(calls, []))
    assert [(len(group.calls), group.beside) for group in groups] == [(45, 45)]
    assert links == []
    assert "add_ ×45" in format_svg(plan_of(calls, []))


def test_program_text_is_escaped_in_svg() -> None:
    plan = plan_of([call_of(0, "worker", ODD, ODD)], [PlannedEdge(None, 0, 8, 0)])
    tree = ElementTree.fromstring(format_svg(plan))
    assert not [*tree.iter("script"), *tree.iter(f"{SVG}script")]
    told = [title.text or "" for title in tree.iter(f"{SVG}title")]
    shown = "<script>&\"'\\x00\\x1b[2J at <m>.py:1"
    assert f"{shown}, 1.000 ms\n\nruns in the workers:\n{shown}" in told
    refused = ElementTree.fromstring(format_svg(Plan(refused=ODD)))
    assert "no call moves: <script>" in "".join(refused.itertext())


def test_svg_supports_both_themes_and_loads_no_resources() -> None:
    plan = explain(nn.Sequential(nn.Flatten(), nn.Linear(400, 2)), torch.zeros(8, 20, 20))
    svg = plan.to_svg()
    assert svg == format_svg(plan)
    tree = ElementTree.fromstring(svg)
    assert tree.get("aria-label") == verdict(plan)
    style = next(tree.iter(f"{SVG}style")).text or ""
    light, _, dark = style.partition("@media (prefers-color-scheme: dark)")
    used = {name for element in tree.iter() for name in (element.get("class") or "").split()}
    assert all(f".{name}" in light for name in used)
    assert ".page" in dark and "text {" in dark
    assert "href" not in svg and "@import" not in svg and "url(http" not in svg
