# SPDX-License-Identifier: Apache-2.0
"""Literals and texts survive a round trip through the native parser."""

from __future__ import annotations

import pytest
import sympy
import torch

from penstock import _C
from penstock.graph.emission import literal, quoted
from penstock.graph.sizes import Unlowerable, fold

LITERALS = [
    None,
    True,
    False,
    0,
    -7,
    2**63 - 1,
    -(2**63),
    0.1,
    -0.0,
    1e-320,
    1.7976931348623157e308,
    float("inf"),
    float("-inf"),
    float("nan"),
    'text with "quotes", \\ and\nlines',
    "caf\u00e9",
    torch.float16,
    torch.bool,
    torch.strided,
    torch.channels_last,
    torch.preserve_format,
    torch.device("cpu"),
]


@pytest.mark.parametrize("value", LITERALS, ids=repr)
def test_literal_round_trips_through_the_parser(value: object) -> None:
    text = f"penstock-ir 1\n%v1 = opaque::f({literal(value)})\noutput %v1\n"
    printed = str(_C.parse_graph(text))
    assert _C.parse_graph(printed) == _C.parse_graph(text)
    line = printed.splitlines()[1]
    inner = line[line.index("(") + 1 : line.rindex(")")]
    if isinstance(value, float) and value == value:
        assert float(inner).hex() == value.hex()
    elif not isinstance(value, str):
        assert inner == literal(value)


def test_values_without_a_text_form_are_rejected() -> None:
    for value in (2**63, 1j, torch.Generator(), object()):
        with pytest.raises(Unlowerable):
            literal(value)


def test_long_labels_are_truncated_to_the_parser_limit() -> None:
    label = quoted("\x00" * 10_000)
    _C.parse_graph(f"penstock-ir 1\n%v1 = opaque::f() group 0 {label}\noutput %v1\n")


def test_size_expressions_fold_to_their_values() -> None:
    s, t = sympy.symbols("s t", integer=True, positive=True)
    from torch.utils._sympy.functions import FloorDiv, Max, Mod

    operators = {
        "add": lambda a, b: a + b,
        "mul": lambda a, b: a * b,
        "floordiv": lambda a, b: a // b,
        "mod": lambda a, b: a % b,
        "max": max,
        "min": min,
    }
    for expression in (s + 3 * t, s * s * t - 5, FloorDiv(s + t, 4), Mod(s * 7, t), Max(s, t)):
        for values in ({s: 5, t: 3}, {s: 17, t: 64}):
            folded = fold(
                expression, lambda x, v=values: v[x], int, lambda op, a, b: operators[op](a, b)
            )
            assert folded == int(expression.subs(values))
    with pytest.raises(Unlowerable, match="sqrt"):
        fold(sympy.sqrt(s), lambda x: 1, int, lambda op, a, b: 1)
