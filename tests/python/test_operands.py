# SPDX-License-Identifier: Apache-2.0
"""The arguments of an operator call, flattened and reassembled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.tracking.leaves import call_of, flatten_call

X = torch.ones(2)
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((X, 2.0), {}),
    (([X, X], 1), {}),
    ((X, [X, None]), {}),
    (([],), {"dtype": torch.float32}),
    ((X, "bilinear"), {"size": [3, 4], "mode": "nearest", "factors": []}),
]


@pytest.mark.parametrize(("args", "kwargs"), CALLS)
def test_flattened_call_is_reassembled_unchanged(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    operands, form = flatten_call(args, kwargs)
    assert not any(isinstance(operand, (list, tuple)) for operand in operands)
    again, named = call_of(operands, form)
    assert repr((again, named)) == repr((args, kwargs))
    others, _ = call_of([0] * len(operands), form)
    assert len(others) == len(args)


def test_calls_of_different_structure_have_different_forms() -> None:
    forms = [flatten_call(args, kwargs)[1] for args, kwargs in CALLS]
    assert len({*forms, flatten_call((X, X, 1), {})[1]}) == len(forms) + 1
    assert flatten_call((1,), {"a": 2})[1] != flatten_call((1, 2), {})[1]
