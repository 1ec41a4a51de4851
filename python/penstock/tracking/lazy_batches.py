# SPDX-License-Identifier: Apache-2.0
"""Decides whether a loader gives out lazy tensors.

It does while an offloaded model is given tensors that the program made from a batch, rather than
the batch, and as long as that leads to a cut that moves something. Each operator that is held back
costs the trainer time, so while nothing moves, one batch in `SAMPLED_EVERY` is lazy, by which plans
are priced again.
"""

from __future__ import annotations

from penstock.tracking.batch_origin import ProvenanceTable
from penstock.tracking.deferral import Deferral

# Calls with such an input before batches become lazy.
STRANGE_CALLS_MIN = 2
# Calls without any use of it before batches are plain again.
USELESS_CALLS_MAX = 16


class LazyBatches:
    """The interface of one offloaded model to the loader. Confined to the training thread."""

    def __init__(self, provenance: ProvenanceTable, user: int) -> None:
        self._provenance = provenance
        self._user = user
        self._strange_calls = 0
        self._useless_calls = 0
        self._has_given_up = False
        self._is_on = False
        self.is_sampling = False  # few batches are lazy

    @property
    def is_undecided(self) -> bool:
        return not (self._is_on or self.is_sampling or self._has_given_up)

    def note_call(self, has_stranger: bool, follows_calls: bool, moves: bool) -> None:
        """To be called after each call of the model that ran a captured graph."""
        if self.is_sampling:
            if follows_calls and moves:
                self._begin()
        elif self._is_on:
            self._useless_calls = 0 if follows_calls and moves else self._useless_calls + 1
            if self._useless_calls >= USELESS_CALLS_MAX:
                if follows_calls:
                    self._sample()
                else:
                    self.give_up()
        elif has_stranger and not self._has_given_up:
            self._strange_calls += 1
            if self._strange_calls >= STRANGE_CALLS_MIN:
                self._begin()

    def _begin(self) -> None:
        table = self._provenance
        table.deferral = table.deferral or Deferral(table)
        table.deferral.sampled_by.discard(self._user)
        table.deferral.wanted_by.add(self._user)
        self._is_on, self.is_sampling, self._useless_calls = True, False, 0

    def _sample(self) -> None:
        deferral = self._provenance.deferral
        assert deferral is not None
        deferral.wanted_by.discard(self._user)
        deferral.sampled_by.add(self._user)
        self._is_on, self.is_sampling = False, True

    def give_up(self) -> None:
        """Batches are plain tensors from the next on, unless another model wants them lazy."""
        self._has_given_up = True
        self._is_on = self.is_sampling = False
        if self._provenance.deferral is not None:
            self._provenance.deferral.forget_user(self._user)
