# SPDX-License-Identifier: Apache-2.0
"""Batches are lazy while that leads to a cut; while no operation moves, few of them are."""

from __future__ import annotations

import pytest
import torch

from penstock.tracking.batch_origin import BatchHandle, Provenance, ProvenanceTable
from penstock.tracking.deferral import SAMPLED_EVERY
from penstock.tracking.lazy_batches import UNKNOWN_INPUT_CALLS_MIN, USELESS_CALLS_MAX, LazyBatches

USER = 1


class Loader:
    """Delivers batches of one tensor, and calls a model with the program's results."""

    def __init__(self) -> None:
        self.table = ProvenanceTable()
        self.lazy = LazyBatches(self.table, USER)

    def deliver(self) -> bool:
        """Whether the batch is lazy for the model."""
        leaf = torch.ones(2)
        handle = BatchHandle(1)
        self.table.record(leaf, Provenance(handle, 0, 0))
        if self.table.deferral is None:
            return False
        [given] = self.table.deferral.delivered([leaf], handle, [leaf])
        return type(given) is not torch.Tensor and handle.may_wait

    def call(self, count: int, *, moves: bool) -> list[bool]:
        """Calls of the model, each with a batch; and which of them were lazy."""
        lazies = []
        for _ in range(count):
            lazies.append(self.deliver())
            self.lazy.note_call(True, follows_calls=lazies[-1], moves=moves and lazies[-1])
        return lazies


@pytest.mark.parametrize("copies_ahead", [False, True])
def test_few_batches_are_lazy_while_nothing_moves(copies_ahead: bool) -> None:
    loader = Loader()
    if copies_ahead:
        loader.table.placements.note(0, torch.device("cuda:0"))
    first = loader.call(UNKNOWN_INPUT_CALLS_MIN + USELESS_CALLS_MAX, moves=False)
    assert first == [False] * UNKNOWN_INPUT_CALLS_MIN + [True] * USELESS_CALLS_MAX
    later = loader.call(10 * SAMPLED_EVERY, moves=False)
    assert later.count(True) == 10
    assert loader.lazy.is_sampling and not loader.lazy.is_undecided


def test_all_batches_are_lazy_again_once_a_plan_moves_something() -> None:
    loader = Loader()
    loader.call(UNKNOWN_INPUT_CALLS_MIN + USELESS_CALLS_MAX + 3, moves=False)
    assert loader.lazy.is_sampling
    assert loader.call(2 * SAMPLED_EVERY, moves=True).count(True) > SAMPLED_EVERY
    assert all(loader.call(4 * SAMPLED_EVERY, moves=True))
    # And vice versa.
    loader.call(USELESS_CALLS_MAX, moves=False)
    assert loader.call(3 * SAMPLED_EVERY, moves=False).count(True) == 3


def test_untraceable_batches_become_plain_permanently() -> None:
    loader = Loader()
    loader.call(UNKNOWN_INPUT_CALLS_MIN, moves=False)
    for _ in range(USELESS_CALLS_MAX):
        assert loader.deliver()
        loader.lazy.note_call(True, follows_calls=False, moves=False)
    assert not any(loader.call(4 * SAMPLED_EVERY, moves=False))


def test_detached_model_gets_no_lazy_samples() -> None:
    loader = Loader()
    loader.call(UNKNOWN_INPUT_CALLS_MIN + USELESS_CALLS_MAX, moves=False)
    loader.lazy.give_up()
    assert not any(loader.call(4 * SAMPLED_EVERY, moves=False))


def test_device_copies_are_traced_between_lazy_samples() -> None:
    loader = Loader()
    loader.call(UNKNOWN_INPUT_CALLS_MIN + USELESS_CALLS_MAX, moves=False)
    leaf = torch.ones(2)
    handle = BatchHandle(1)
    assert loader.table.deferral is not None
    loader.table.record(leaf, Provenance(handle, 0, 0))
    [given] = loader.table.deferral.delivered([leaf], handle, [leaf])
    assert type(given) is torch.Tensor  # without a copy
    loader.table.placements.note(0, torch.device("cuda:0"))
    [given] = loader.table.deferral.delivered([leaf], handle, [leaf])
    assert type(given) is not torch.Tensor and not handle.may_wait
