# SPDX-License-Identifier: Apache-2.0
"""A plan as a graph in Graphviz's language."""

from __future__ import annotations

from penstock.graph.plan_record import PlannedCall, PlannedEdge, PlanRecord

# The calls of "both" sides stand outside the two boxes: no tensor crosses because of them.
CLUSTERS = (("worker", "workers"), ("trainer", "trainer"))


def format_dot(plan: PlanRecord) -> str:
    """Calls are nodes with their time, tensors are edges with their bytes; edges that cross the cut
    are bold. A plan that was refused is one node with the reason."""
    lines = ["digraph plan {", "  node [shape=box];"]
    if plan.refused is not None:
        lines += [f"  {quote('refused')} [label={quote(f'nothing moves: {plan.refused}')}];", "}"]
        return "\n".join(lines)
    calls = [*plan.moved, *plan.kept]
    totals = {"worker": plan.worker_s, "trainer": plan.trainer_s}
    for place, name in CLUSTERS:
        title = f"{name}, {totals[place] * 1e3:.3f} ms per batch"
        if place == "trainer":
            title += " on what could move"
        lines += [f"  subgraph {quote(f'cluster_{place}')} {{", f"    label={quote(title)};"]
        lines += [f"    {node_line(call)}" for call in calls if call.place == place]
        lines.append("  }")
    lines += [f"  {node_line(call)}" for call in calls if call.place == "both"]
    for leaf in sorted({edge.leaf for edge in plan.edges if edge.leaf is not None}):
        label = quote(f"tensor {leaf} of the batch")
        lines.append(f"  {quote(f'leaf {leaf}')} [shape=ellipse, label={label}];")
    if any(edge.target is None for edge in plan.edges):
        lines.append(f"  {quote('result')} [shape=ellipse, label={quote('result of forward')}];")
    moved = {call.index for call in plan.moved}
    staying = {call.index for call in plan.kept if call.place == "trainer"}
    for edge in plan.edges:
        crosses = edge.source in moved and (edge.target is None or edge.target in staying)
        lines.append(f"  {edge_line(edge, crosses)}")
    return "\n".join([*lines, "}"])


def node_line(call: PlannedCall) -> str:
    what, separator, where = call.operator.rpartition(" at ")
    title = f"{what}\n{where}" if separator else where
    seconds = call.worker_s if call.place == "worker" else call.trainer_s
    if seconds:
        title += f"\n{seconds * 1e3:.3f} ms"
    style = ", style=dashed" if call.place == "both" else ""
    attributes = f"label={quote(title)}, tooltip={quote(call.reason)}{style}"
    return f"{quote(f'call {call.index}')} [{attributes}];"


def edge_line(edge: PlannedEdge, crosses: bool) -> str:
    source = f"call {edge.source}" if edge.source is not None else f"leaf {edge.leaf}"
    target = f"call {edge.target}" if edge.target is not None else "result"
    label = f"label={quote(f'{edge.tensor_bytes:,}')}"
    return f"{quote(source)} -> {quote(target)} [{label}{', style=bold' if crosses else ''}];"


def quote(text: str) -> str:
    """A string of the language. A backslash in a label begins an escape (`\\N` is the node's
    name), so those of the text are doubled."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
