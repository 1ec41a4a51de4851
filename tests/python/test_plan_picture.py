# SPDX-License-Identifier: Apache-2.0
"""The picture of a plan: it has every call, its boxes are few, and it fits into a message."""

from __future__ import annotations

import json
import random
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from shown_pools import large_plan, small_plan, told_plan

from penstock.graph.plan import Plan, PlannedCall, PlannedEdge, RunningPrice
from penstock.graph.plan_picture import BOXES_MAX, group_calls, picture_json
from penstock.graph.plan_text import role_of, verdict
from penstock.live.pool_watch import shown_plan

ODD = "</script><!-- <script>&\"' at <m>.py:1"


def call_of(index: int, place: str, operator: str, reason: str = "because") -> PlannedCall:
    return PlannedCall(index, operator, place, reason, 1e-3, 2e-3, 4096)


def plan_of(calls: list[PlannedCall], edges: list[PlannedEdge]) -> Plan:
    return Plan(
        moved=tuple(call for call in calls if call.place == "worker"),
        kept=tuple(call for call in calls if call.place != "worker"),
        edges=tuple(edges),
    )


def random_plan(chance: random.Random, call_count: int) -> Plan:
    """Return a plan in which the calls of both sides are mixed, and some edges lead back, as where
    several calls write to the same memory."""
    calls: list[PlannedCall] = []
    edges = []
    for index in range(call_count):
        place = chance.choices(["worker", "trainer", "both"], [3, 6, 1])[0]
        reason = chance.choice(["it could move, at the same price", f"it reads a{index}.weight"])
        calls.append(call_of(index, place, f"op{chance.randrange(4)} at m.py:{index}", reason))
        for _ in range(chance.randrange(4)):
            source = chance.randrange(index) if index and chance.random() < 0.9 else None
            if source is not None and place != "trainer" and calls[source].place == "trainer":
                continue
            leaf = chance.randrange(5) if source is None else None
            edges.append(PlannedEdge(source, index, chance.randrange(1 << 20), leaf))
    if call_count > 3:
        edges.append(PlannedEdge(call_count - 1, call_count - 3, 8, None))
    edges.append(PlannedEdge(call_count - 1, None, 8, None))
    return plan_of(calls, edges)


def picture_of(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(picture_json(plan))
    return found


@pytest.mark.parametrize("call_count", [1, 7, 40, 41, 200, 700])
def test_every_call_is_in_one_box_and_boxes_are_few(seed: int, call_count: int) -> None:
    chance = random.Random(seed)
    for _ in range(2):
        plan = random_plan(chance, call_count)
        boxes = group_calls(plan)
        assert sorted(call.index for calls in boxes for call in calls) == [*range(call_count)]
        assert all(len({call.place for call in calls}) == 1 for calls in boxes)
        if call_count <= 40:
            assert all(len(calls) == 1 for calls in boxes)
        picture = picture_of(plan)
        shown = picture["calls"]
        assert len(shown) <= BOXES_MAX
        assert sum(box["count"] for box in shown) + picture["calls_left_out"] == call_count
        pairs = [(edge["source"], edge["target"]) for edge in picture["edges"]]
        assert len({*pairs}) == len(pairs)
        assert all(source is None or source != target for source, target in pairs)


def test_edges_lead_downwards(seed: int) -> None:
    """The drawing leaves out edges that lead back, of which only memory that is written has any."""
    chance = random.Random(seed)
    for call_count in (30, 300):
        plan = random_plan(chance, call_count)
        back = (call_count - 1, call_count - 3)
        forth = tuple(edge for edge in plan.edges if (edge.source, edge.target) != back)
        picture = picture_of(plan_of([*plan.moved, *plan.kept], [*forth]))
        assert picture["edges"]
        for edge in picture["edges"]:
            assert None in (edge["source"], edge["target"]) or edge["source"] < edge["target"]


def test_calls_that_stay_share_a_box() -> None:
    moved = [call_of(i, "worker", f"mul at m.py:{i}") for i in range(5)]
    kept = [call_of(i, "trainer", f"linear at m.py:{i}", "it reads a") for i in range(5, 60)]
    edges = [PlannedEdge(None, 0, 64, 0), *(PlannedEdge(i, i + 1, 64, None) for i in range(59))]
    picture = picture_of(plan_of([*moved, *kept], edges))
    assert [box["count"] for box in picture["calls"]] == [1, 1, 1, 1, 1, 55]
    folded = picture["calls"][-1]
    assert folded["name"] == "55 calls: linear … linear at m.py:5-59"
    assert (folded["where"], folded["reason"]) == ("trainer", "it reads a")
    assert folded["members"][0] == "linear at m.py:5"
    assert folded["members"][-1] == "and 31 more calls"
    assert folded["seconds"] == pytest.approx(55 * 2e-3) and folded["bytes"] == 55 * 4096
    crossing = picture["edges"][-1]
    assert crossing == {"source": 4, "target": 5, "bytes": 64, "leaves": []}


def test_tensor_that_several_calls_of_a_box_read_counts_once() -> None:
    calls = [call_of(0, "worker", "mul at m.py:1")]
    calls += [call_of(i, "trainer", f"linear at m.py:{i}") for i in range(1, 50)]
    reads = [PlannedEdge(0, i, 64, None) for i in range(1, 50)]
    leaves = [PlannedEdge(None, i, 8, leaf) for i in range(1, 50) for leaf in (0, 1)]
    picture = picture_of(plan_of(calls, [*reads, *leaves]))
    assert picture["edges"] == [
        {"source": 0, "target": 1, "bytes": 64, "leaves": []},
        {"source": None, "target": 1, "bytes": 16, "leaves": [0, 1]},
    ]


def test_alternating_decisions_share_boxes_by_place() -> None:
    reasons = ("it could move, at the same price", "it reads a.weight, which training changes")
    kept = [call_of(i, "trainer", f"add at m.py:{i}", reasons[i % 2]) for i in range(200)]
    (calls,) = group_calls(plan_of(kept, []))
    assert {role_of(call) for call in calls} == {"cheaper", "stays"}


def test_text_is_limited_in_bytes_and_counts_omitted_calls() -> None:
    calls = [
        call_of(i, ("worker", "both")[i % 2], f"{'ä' * 90} at m.py:{i}", "é" * 500)
        for i in range(300)
    ]
    for bytes_max in (4096, 1 << 16):
        text = plan_of(calls, [PlannedEdge(0, 299, 8, None)]).told(bytes_max)
        assert bytes_max // 4 < len(text.encode()) <= bytes_max
        picture = json.loads(text)
        assert sum(box["count"] for box in picture["calls"]) + picture["calls_left_out"] == 300
        assert picture["calls_left_out"] > 0 and picture["edges"] == []


def test_large_plan_fits_into_a_report() -> None:
    """Each call was reported alone, so the last calls of a plan of 500 were left out."""
    picture = shown_plan(large_plan().told(1 << 16))
    assert picture is not None and picture["calls_left_out"] == 0
    assert [box["count"] for box in picture["calls"]] == [1] * 12 + [184]
    assert "which training changes" in picture["calls"][-1]["reason"]
    edges = [(edge["source"], edge["target"]) for edge in picture["edges"]]
    assert edges == [(None, 0), *((place - 1, place) for place in range(1, 13)), (12, None)]


def test_reported_picture_is_read_back() -> None:
    assert shown_plan("") is None
    picture = shown_plan(told_plan())
    assert picture == json.loads(told_plan())
    assert [box["name"] for box in picture["calls"]][2:4] == [
        "normalize at model.py:13", "size at model.py:14",
    ]  # fmt: skip
    assert picture["facts"][1].startswith("this plan: 4.1 ms of worker time and 4 ms of trainer")
    pairs = {(edge["source"], edge["target"]) for edge in picture["edges"]}
    assert pairs == {(None, 0), (0, 1), (1, 2), (0, 2), (2, 4), (None, 4), (4, None)}
    refused = shown_plan(Plan(refused="it has no graph").told(4096))
    assert refused is not None and refused["calls"] == []
    assert refused["verdict"] == "no call moves: it has no graph"


@pytest.mark.parametrize(
    "change",
    [
        {"edges": [{"source": 9, "target": 0, "bytes": 8, "leaves": []}]},
        {"edges": [{"source": -1, "target": 0, "bytes": 8, "leaves": []}]},
        {"edges": [{"source": "0", "target": 0, "bytes": 8, "leaves": []}]},
        {"calls": [{"name": "a"}]},
        {"calls_left_out": []},
    ],
)
def test_reported_picture_with_an_unknown_box_is_rejected(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the trainer has reported an invalid plan"):
        shown_plan(json.dumps({**json.loads(told_plan()), **change}))


def test_reported_place_is_one_of_three() -> None:
    told = json.loads(told_plan())
    told["calls"][0]["where"] = "elsewhere"
    with pytest.raises(ValueError, match="invalid plan"):
        shown_plan(json.dumps(told))


def test_measured_plan_lists_its_measurement() -> None:
    price = RunningPrice(7, 1, 0.02, 0.04, 2, 0.0, 0.021, False)
    (fact,) = picture_of(Plan(priced=price))["facts"]
    assert fact.startswith("Priced 7 times from the running loader, changed once: a step takes 21")


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags:
            self.texts.setdefault(self.tags[-1][0], []).append(data)


def test_page_has_the_picture_and_loads_nothing() -> None:
    plan = small_plan()
    page = plan.to_html()
    read = Elements(page)
    data, *scripts = read.texts["script"]
    script = "".join(scripts)
    assert json.loads(data) == picture_of(plan)
    assert "class PlanPicture" in script
    assert not re.search(r"^\s*(import|export)\b", script, re.MULTILINE)
    assert {attrs.get("src") or attrs.get("href") for _, attrs in read.tags} == {None}
    assert not re.search(r"url\(|@import|\bfetch\(", page)
    policy = next(a["content"] for _, a in read.tags if a.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'")
    assert verdict(plan) in "".join(read.texts["noscript"])


def test_program_text_is_no_markup_of_the_page() -> None:
    plan = plan_of([call_of(0, "worker", ODD, ODD)], [PlannedEdge(None, 0, 8, 0)])
    read = Elements(plan.to_html())
    tags = [tag for tag, _ in read.tags]
    assert tags == [tag for tag, _ in Elements(small_plan().to_html()).tags]
    (box,) = json.loads(read.texts["script"][0])["calls"]
    assert (box["name"], box["reason"]) == (ODD, ODD)
    refused = Elements(Plan(refused=ODD).to_html())
    assert f"no call moves: {ODD}" in "".join(refused.texts["noscript"])


def test_svg_without_graphviz_names_the_alternative(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.warns(DeprecationWarning, match=r"use to_html\(\)"),
        pytest.raises(RuntimeError, match="dot of Graphviz, which is not on the PATH; install"),
    ):
        small_plan().to_svg()


@pytest.mark.skipif(shutil.which("dot") is None, reason="there is no Graphviz")
def test_svg_is_drawn_by_graphviz() -> None:
    with pytest.warns(DeprecationWarning):
        tree = ElementTree.fromstring(small_plan().to_svg())
    texts = {"".join(text.itertext()) for text in tree.iter("{http://www.w3.org/2000/svg}text")}
    assert {"normalize", "model.py:13", "602,112"} <= texts
