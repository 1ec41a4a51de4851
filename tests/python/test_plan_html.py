# SPDX-License-Identifier: Apache-2.0
"""A plan in a notebook: its contents, and that no part of a program's text is taken for HTML."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from penstock.explanation.explanation import explain
from penstock.graph.plan import OPEN_CALLS_MAX, CutTotals, Plan, PlannedCall, format_html
from penstock.graph.plan_record import verdict

ODD = "<script>alert('a')</script> & \"b\" at <m>.py:1"


def call_of(index: int, place: str = "worker", text: str = "mul at m.py:7") -> PlannedCall:
    return PlannedCall(index, text, place, f"because of {text}", 1e-3, 2e-3, 4096)


def tree_of(plan: Plan) -> ElementTree.Element:
    """The HTML as a tree; its elements are closed and its text escaped, or this raises."""
    return ElementTree.fromstring(format_html(plan))


def texts(tree: ElementTree.Element, path: str) -> list[str]:
    return ["".join(element.itertext()) for element in tree.iterfind(path)]


def test_verdict_is_first_and_each_call_has_a_row() -> None:
    plan = Plan(
        moved=(call_of(0),),
        kept=(call_of(1, "trainer", "linear at m.py:8"), call_of(2, "both", "ones at m.py:9")),
        totals=(
            CutTotals("none", 0.0, 0.002, 3_000, 3_000),
            CutTotals("maximal", 0.001, 0.0, 12_000, 12_000),
            CutTotals("chosen", 0.001, 0.0, 12_000, 12_000),
        ),
    )
    tree = tree_of(plan)
    assert "".join(tree[0].itertext()) == verdict(plan)
    assert [texts(row, "td") for row in tree.iterfind("details/table/tbody/tr")] == [
        ["mul at m.py:7", "worker", "1.000", "2.000", "4,096", "1"],
        ["linear at m.py:8", "trainer", "1.000", "2.000", "4,096", "2"],
        ["ones at m.py:9", "both", "1.000", "2.000", "4,096", "3"],
    ]
    assert texts(tree, "details/ol/li") == [call.reason for call in (*plan.moved, *plan.kept)]
    assert [texts(row, "td") for row in tree.iterfind("table/tbody/tr")] == [
        ["no cut", "0.000", "2.000", "3,000"],
        ["everything that can move", "1.000", "0.000", "12,000"],
        ["this plan", "1.000", "0.000", "12,000"],
    ]


def test_program_text_is_escaped_in_html() -> None:
    tree = tree_of(Plan(moved=(call_of(0, text=ODD),)))
    row = tree.find("details/table/tbody/tr")
    assert row is not None
    assert texts(row, "td")[0] == ODD
    assert [cell.get("title") for cell in row][-1] == f"because of {ODD}"
    assert texts(tree, "details/ol/li") == [f"because of {ODD}"]
    assert {element.tag for element in tree.iter()}.isdisjoint({"script", "m"})
    refused = tree_of(Plan(refused=ODD))
    assert "".join(refused.itertext()) == f"no call moves: {ODD}"


@pytest.mark.parametrize(("count", "is_open"), [(OPEN_CALLS_MAX, True), (600, False)])
def test_long_table_is_collapsed(count: int, is_open: bool) -> None:
    details = tree_of(Plan(kept=tuple(call_of(i, "trainer") for i in range(count)))).find("details")
    assert details is not None
    assert ("open" in details.attrib) is is_open
    assert len([*details.iterfind("table/tbody/tr")]) == count


def test_colours_suit_light_and_dark_themes() -> None:
    """It inherits the colour of the text, all grounds are translucent, and it fetches no
    resources."""
    plan = explain(nn.Sequential(nn.Flatten(), nn.Linear(400, 2)), torch.zeros(8, 20, 20))
    html = plan._repr_html_()
    assert html == format_html(plan)
    assert "flatten" in html and "linear" in html
    assert set(re.findall(r"[\s;\"]color:([^;\"]+)", html)) <= {"inherit"}
    grounds = set(re.findall(r"background(?:-color)?:([^;\"]+)", html))
    assert all(ground == "none" or ground.endswith(",0.25)") for ground in grounds)
    assert not re.search(r"url\(|src=|href=|<style|<script", html)
