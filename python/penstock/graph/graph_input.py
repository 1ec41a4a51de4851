# SPDX-License-Identifier: Apache-2.0
"""The value that one placeholder of a captured graph stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# A "made" one is computed in the graph itself, by an expression in front of what was captured.
InputKind = Literal["leaf", "const", "state", "int", "made"]


@dataclass(frozen=True)
class GraphInput:
    kind: InputKind
    label: str  # how Dynamo names the source: L['self']._buffers['mean']
    leaf_index: int = -1
    dynamic_dims: tuple[int, ...] = ()
    size_of: tuple[int, int] | None = None  # an int that is this dimension of that input
