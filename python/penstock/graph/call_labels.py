# SPDX-License-Identifier: Apache-2.0
"""The name of a call of a captured graph and of its inputs, and where the call is written."""

from __future__ import annotations

import re

from torch import fx

from penstock.seams.operators import OpOverload

MODULE_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
MEMBER_PATH = re.compile(
    r"L\['\w+'\](?:\.__self__)?(?:\._(?:modules|parameters|buffers)\['[^']+'\])+"
)


def call_label(node: fx.Node) -> str:
    """`interpolate at model.py:12`, as a person would say which call it is."""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if isinstance(node.target, OpOverload):
        target = target.partition(".")[0]  # which overload it is, the program did not say
    return f"{target or node.target} at {source_line(node)}" if source_line(node) else str(target)


def source_line(node: fx.Node) -> str:
    """`model.py:12`, the innermost line of the user's program, or nothing."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    if not lines:
        return ""
    parts = lines[-1].split('"')
    line = lines[-1].rpartition("line ")[2].split(",")[0]
    return f"{parts[1].rpartition('/')[2]}:{line}"


def spoken_source(label: str) -> str:
    """`net.0.weight` for `L['self']._modules['net']._modules['0']._parameters['weight']`."""
    members = MODULE_MEMBER.findall(label)
    return ".".join(members) if MEMBER_PATH.fullmatch(label) else label
