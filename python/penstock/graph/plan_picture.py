# SPDX-License-Identifier: Apache-2.0
"""The picture of a plan: its boxes and edges, which one script draws, and its graph for Graphviz.

The dashboard and the page of `Plan.to_html()` show the same picture by `pages/plan_picture.js`. In
a plan of more than 40 calls, consecutive calls that have to stay share a box; if that is not
enough, so do other consecutive calls for which the plan has the same decision.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from penstock.graph.plan_record import PlannedCall, PlannedEdge, PlanRecord
from penstock.graph.plan_text import (
    CUT_NAMES,
    NumberedReasons,
    format_summary,
    format_table,
    notes,
    role_of,
    shorten,
    span,
    verdict,
)

SMALL_MAX = 40  # calls that each have a separate box
BOXES_MAX = 60
_TEXT_MAX = 200  # characters of an operator or a reason
_MEMBERS_MAX = 24  # calls listed per box
_REASONS_MAX = 6
_PLACES = ("worker", "trainer", "both")
# The scripts of the page of a plan, each after the modules that it imports.
_SCRIPTS = ("dom.js", "words.js", "plan_picture.js")
_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'">
<title>Plan – penstock</title>
<style>
{style}</style>
<main><h1>Plan</h1></main>
<noscript>{verdict} The picture requires JavaScript.</noscript>
<script id="plan" type="application/json">{plan}</script>
<script type="module">
{script}
const picture = new PlanPicture();
document.querySelector("main").append(picture.node);
picture.show(JSON.parse(document.querySelector("#plan").textContent));
</script>
</html>
"""

# Calls on "both" sides are drawn outside the two boxes: they cause no tensor to cross.
_CLUSTERS = (("worker", "workers"), ("trainer", "trainer"))


def group_calls(plan: PlanRecord) -> list[list[PlannedCall]]:
    """Return the calls of each box, from top to bottom.

    Calls that run in the workers or on both sides are first: they read no result of a call that
    only the trainer runs.
    """
    calls = sorted(
        (*plan.moved, *plan.kept), key=lambda call: (call.place == "trainer", call.index)
    )
    roles = [role_of(call) for call in calls]
    boxes = [[call] for call in calls]
    if len(calls) > SMALL_MAX:
        boxes = _join_equal(calls, [role if role == "stays" else None for role in roles])
    if len(boxes) > BOXES_MAX:
        boxes = _join_equal(calls, roles)
    if len(boxes) > BOXES_MAX:
        boxes = _join_equal(calls, [call.place for call in calls])
    return boxes


def _join_equal(
    calls: Sequence[PlannedCall], keys: Sequence[str | None]
) -> list[list[PlannedCall]]:
    """Join consecutive calls that have the same key; None stands for a separate box."""
    boxes: list[list[PlannedCall]] = []
    previous = None
    for call, key in zip(calls, keys, strict=True):
        if key is not None and key == previous:
            boxes[-1].append(call)
        else:
            boxes.append([call])
        previous = key
    return boxes


def picture_json(plan: PlanRecord, bytes_max: int | None = None) -> str:
    """Return the picture as one JSON object, as a pool's dashboard shows it to the pool's users.

    It has ``verdict``, a sentence; ``facts``, a list of sentences; ``calls``, the boxes from top to
    bottom, each with ``name``, ``where`` (as `PlannedCall.place`), ``reason``, ``seconds`` per
    batch where it runs, ``bytes`` that it makes, the ``count`` of its calls and ``members``, their
    names if there are several; ``edges``, each with ``source`` and ``target``, which are positions
    in that list, or None for the batch and for the result of forward, ``bytes``, and ``leaves``,
    the numbers of the batch's tensors; and ``calls_left_out``, the number of calls in no box.

    Args:
        plan (PlanRecord): Plan.
        bytes_max (int | None): Limit on the size of the text in bytes, 4096 or more; the last boxes
            are left out if necessary. Default: None, no limit.

    Returns:
        str: JSON text.
    """
    boxes = group_calls(plan)
    count = min(len(boxes), BOXES_MAX)
    while True:
        text = json.dumps(_picture(plan, boxes[:count], sum(map(len, boxes[count:]))))
        size = len(text)  # ASCII
        if bytes_max is None or size <= bytes_max or count == 0:
            return text
        count = min(count - 1, count * bytes_max // size)


def _picture(
    plan: PlanRecord, boxes: Sequence[Sequence[PlannedCall]], left_out: int
) -> dict[str, Any]:
    return {
        "verdict": verdict(plan)[: 4 * _TEXT_MAX],
        "facts": [fact[: 4 * _TEXT_MAX] for fact in _facts(plan)],
        "calls": [_box(calls) for calls in boxes],
        "edges": _edges(plan.edges, boxes),
        "calls_left_out": left_out,
    }


def _facts(plan: PlanRecord) -> list[str]:
    """Return the costs of each cut, and their conditions, as sentences."""
    costs = [
        f"{CUT_NAMES[item.cut]}: {1e3 * item.worker_s:.3g} ms of worker time and "
        f"{1e3 * item.trainer_s:.3g} ms of trainer time per batch, "
        f"{item.boundary_bytes / 1e6:.3g} MB read by the trainer"
        for item in plan.totals
    ]
    return [*costs, *notes(plan)]


def _box(calls: Sequence[PlannedCall]) -> dict[str, Any]:
    reasons = [reason[:_TEXT_MAX] for reason in NumberedReasons(calls).sentences()]
    members = [shorten(call.operator, _TEXT_MAX // 2) for call in calls]
    is_moved = calls[0].place == "worker"
    return {
        "name": members[0] if len(calls) == 1 else f"{len(calls)} calls: {span(calls)}",
        "where": calls[0].place,
        "reason": "; ".join(_first(reasons, _REASONS_MAX, "reasons")),
        "seconds": sum(call.worker_s if is_moved else call.trainer_s for call in calls),
        "bytes": sum(call.made_bytes for call in calls),
        "count": len(calls),
        "members": _first(members, _MEMBERS_MAX, "calls") if len(calls) > 1 else [],
    }


def _first(texts: Sequence[str], count_max: int, name: str) -> list[str]:
    left_out = len(texts) - count_max
    return [*texts[:count_max], *([f"and {left_out} more {name}"] if left_out > 0 else [])]


def _edges(
    edges: Sequence[PlannedEdge], boxes: Sequence[Sequence[PlannedCall]]
) -> list[dict[str, Any]]:
    """Return the edges between boxes, in which a tensor that several calls read counts once."""
    home: dict[int | None, int | None] = {None: None}
    for place, calls in enumerate(boxes):
        home.update((call.index, place) for call in calls)
    # By the ends of an edge: the bytes of its tensors by their maker and their number in the batch.
    passed: dict[tuple[int | None, int | None], dict[tuple[int | None, int], int]] = {}
    for edge in edges:
        if edge.source not in home or edge.target not in home:
            continue  # a call that is left out
        source, target = home[edge.source], home[edge.target]
        if source is None or source != target:
            tensors = passed.setdefault((source, target), {})
            key = edge.source, edge.leaf or 0
            tensors[key] = max(tensors.get(key, 0), edge.tensor_bytes)
    return [
        {
            "source": source,
            "target": target,
            "bytes": sum(tensors.values()),
            "leaves": sorted(leaf for _, leaf in tensors) if source is None else [],
        }
        for (source, target), tensors in passed.items()
    ]


def read_picture(text: str) -> dict[str, Any]:
    """Return the picture that `picture_json` wrote. Raises an exception if the text is another."""
    told = json.loads(text)
    place_of: dict[int | None, int | None] = {None: None}
    place_of.update((place, place) for place in range(len(told["calls"])))
    return {
        "verdict": str(told["verdict"]),
        "facts": [str(fact) for fact in told["facts"]],
        "calls": [
            {
                "name": str(call["name"]),
                "where": _PLACES[_PLACES.index(call["where"])],
                "reason": str(call["reason"]),
                "seconds": float(call["seconds"]),
                "bytes": int(call["bytes"]),
                "count": int(call["count"]),
                "members": [str(name) for name in call["members"]],
            }
            for call in told["calls"]
        ],
        "edges": [
            {
                "source": place_of[edge["source"]],
                "target": place_of[edge["target"]],
                "bytes": int(edge["bytes"]),
                "leaves": [int(leaf) for leaf in edge["leaves"]],
            }
            for edge in told["edges"]
        ],
        "calls_left_out": int(told["calls_left_out"]),
    }


def format_page(plan: PlanRecord) -> str:
    """Return the picture as one HTML file that loads no other."""
    pages = files("penstock").joinpath("pages")
    scripts = [pages.joinpath(name).read_text(encoding="utf-8") for name in _SCRIPTS]
    return _PAGE.format(
        style=pages.joinpath("style.css").read_text(encoding="utf-8"),
        verdict=escape(verdict(plan)),
        plan=picture_json(plan).replace("<", "\\u003c"),  # no text ends the element
        script=re.sub(r"^(import .*;\n|export )", "", "".join(scripts), flags=re.MULTILINE),
    )


def format_notebook(plan: PlanRecord) -> str:
    """Return the summary as HTML for a notebook, and the table below it, folded.

    It has the colours of the page, since a notebook's theme may differ from the system's theme.
    """
    style = "background:none;color:inherit;overflow-x:auto"
    return (
        f'<div class="penstock-plan"><pre style="{style}">{escape(format_summary(plan))}</pre>'
        f"<details><summary>{len(plan.moved) + len(plan.kept)} calls of the model</summary>"
        f'<pre style="{style}">{escape(format_table(plan))}</pre></details></div>'
    )


def format_dot(plan: PlanRecord) -> str:
    """Return a plan as a graph in Graphviz's language.

    Calls are nodes with their time, tensors are edges with their bytes; edges that cross the cut
    are bold. A plan that was refused is one node with the reason.
    """
    lines = ["digraph plan {", "  node [shape=box];"]
    if plan.refused is not None:
        return "\n".join([*lines, f"  {_quote('refused')} [label={_quote(verdict(plan))}];", "}"])
    calls = [*plan.moved, *plan.kept]
    totals = {"worker": plan.worker_s, "trainer": plan.trainer_s}
    for place, name in _CLUSTERS:
        title = f"{name}, {totals[place] * 1e3:.3f} ms per batch"
        if place == "trainer":
            title += " on movable calls"
        lines += [f"  subgraph {_quote(f'cluster_{place}')} {{", f"    label={_quote(title)};"]
        lines += [f"    {_dot_node(call)}" for call in calls if call.place == place]
        lines.append("  }")
    lines += [f"  {_dot_node(call)}" for call in calls if call.place == "both"]
    for leaf in sorted({edge.leaf for edge in plan.edges if edge.leaf is not None}):
        label = _quote(f"tensor {leaf} of the batch")
        lines.append(f"  {_quote(f'leaf {leaf}')} [shape=ellipse, label={label}];")
    if any(edge.target is None for edge in plan.edges):
        lines.append(f"  {_quote('result')} [shape=ellipse, label={_quote('result of forward')}];")
    moved = {call.index for call in plan.moved}
    staying = {call.index for call in plan.kept if call.place == "trainer"}
    for edge in plan.edges:
        crosses = edge.source in moved and (edge.target is None or edge.target in staying)
        lines.append(f"  {_dot_edge(edge, crosses)}")
    return "\n".join([*lines, "}"])


def _dot_node(call: PlannedCall) -> str:
    what, separator, where = call.operator.rpartition(" at ")
    title = f"{what}\n{where}" if separator else where
    seconds = call.worker_s if call.place == "worker" else call.trainer_s
    if seconds:
        title += f"\n{seconds * 1e3:.3f} ms"
    style = ", style=dashed" if call.place == "both" else ""
    attributes = f"label={_quote(title)}, tooltip={_quote(call.reason)}{style}"
    return f"{_quote(f'call {call.index}')} [{attributes}];"


def _dot_edge(edge: PlannedEdge, crosses: bool) -> str:
    source = f"call {edge.source}" if edge.source is not None else f"leaf {edge.leaf}"
    target = f"call {edge.target}" if edge.target is not None else "result"
    label = f"label={_quote(f'{edge.tensor_bytes:,}')}"
    return f"{_quote(source)} -> {_quote(target)} [{label}{', style=bold' if crosses else ''}];"


def _quote(text: str) -> str:
    """Return a string literal of the language.

    A backslash in a label starts an escape (`\\N` is the node's name), so backslashes of the text
    are doubled.
    """
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def find_graphviz() -> str:
    """Return the path of Graphviz's `dot`. Raises RuntimeError if it is not installed."""
    if (dot := shutil.which("dot")) is None:
        raise RuntimeError(
            "an SVG file of a plan needs the command dot of Graphviz, which is not on the PATH; "
            "install Graphviz, or write the picture as HTML"
        )
    return dot


def format_svg(plan: PlanRecord) -> str:
    """Return the graph as Graphviz draws it."""
    drawn = subprocess.run(
        [find_graphviz(), "-Tsvg"], input=format_dot(plan).encode(), capture_output=True, check=True
    )
    return drawn.stdout.decode()
