# SPDX-License-Identifier: Apache-2.0
"""The numbering of a batch's tensors."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch

from penstock.tracking.leaves import flatten_batch

Pair = namedtuple("Pair", "first second")


@dataclass
class Record:
    image: Any
    label: Any


def test_leaves_come_in_the_order_in_which_the_nest_is_written() -> None:
    a, b, c, d, e, f = (torch.tensor(float(k)) for k in range(6))
    batch = {"z": [a, (b, "text", None)], "a": Pair(c, 3), "m": OrderedDict(y=d), "r": Record(e, f)}
    assert [id(leaf) for leaf in flatten_batch(batch)] == [id(t) for t in (a, b, c, d, e, f)]


def test_a_tensor_that_is_there_twice_counts_at_its_first_place() -> None:
    a, b = torch.zeros(2), torch.zeros(2)
    assert [id(leaf) for leaf in flatten_batch([a, b, {"again": a}, (b,)])] == [id(a), id(b)]


def test_what_holds_no_tensors_has_no_leaves() -> None:
    assert flatten_batch({"n": 1, "s": "x", "o": object(), "t": Record}) == []
