# SPDX-License-Identifier: Apache-2.0
"""Decide whether a loader returns lazy tensors, and prepare them as a model's inputs.

A loader returns lazy tensors while the inputs of an offloaded model are tensors that the program
made from a batch, rather than the batch, and as long as this leads to a cut that moves calls. Each
deferred operator costs the trainer time, so while no calls move, one batch in `SAMPLED_EVERY` is
lazy, for repricing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.graph.expression import Expression
from penstock.tracking.batch_origin import BatchHandle, Provenance, ProvenanceTable
from penstock.tracking.deferral import Deferral
from penstock.tracking.lazy_tensor import LazyTensor, is_written, memory_in
from penstock.tracking.lazy_value import LazyValue, compute_waiting

# Calls with such an input before batches become lazy.
UNKNOWN_INPUT_CALLS_MIN = 2
# Calls without any use of it before batches are plain again.
USELESS_CALLS_MAX = 16


class LazyBatches:
    """The interface of one offloaded model to the loader. Confined to the training thread."""

    def __init__(self, provenance: ProvenanceTable, user: int) -> None:
        self._provenance = provenance
        self._user = user
        self._unknown_input_calls = 0
        self._useless_calls = 0
        self._has_given_up = False
        self._is_on = False
        self.is_sampling = False  # few batches are lazy

    @property
    def is_undecided(self) -> bool:
        return not (self._is_on or self.is_sampling or self._has_given_up)

    def note_call(self, has_unknown_input: bool, follows_calls: bool, moves: bool) -> None:
        """Update the decision; call after each call of the model that ran a captured graph."""
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
        elif has_unknown_input and not self._has_given_up:
            self._unknown_input_calls += 1
            if self._unknown_input_calls >= UNKNOWN_INPUT_CALLS_MIN:
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
        """Make batches plain tensors from the next on, unless another model wants them lazy."""
        self._has_given_up = True
        self._is_on = self.is_sampling = False
        if self._provenance.deferral is not None:
            self._provenance.deferral.forget_user(self._user)


@dataclass(slots=True)
class LazyInputs:
    """Inputs with ordinary tensors for lazy ones, except values that are still to be computed."""

    inputs: Sequence[Any]
    waiting: dict[int, LazyValue] = field(default_factory=dict)  # by input
    withheld: dict[int, LazyValue] = field(default_factory=dict)  # by input: still with a worker
    found: dict[int, Provenance] = field(default_factory=dict)  # of these two
    follows_calls: bool = False  # whether an input is a tensor that the program made from the batch
    _handles: list[BatchHandle] = field(default_factory=list)

    @classmethod
    def of(cls, inputs: Sequence[Any]) -> LazyInputs:
        """Separate the lazy tensors among `inputs` from the others."""
        items = list(inputs)
        lazy = cls(items)
        for index, item in enumerate(inputs):
            if type(item) is not LazyTensor or item._value is None:
                continue
            if item.requires_grad:
                items[index] = memory_in(item)
            else:
                items[index] = lazy._resolve(index, item, item._value)
        return lazy

    def _resolve(self, index: int, item: LazyTensor, value: LazyValue) -> Any:
        handle = value.batch
        if handle is not None and handle not in self._handles:
            self._handles.append(handle)
        if is_written(item):
            tensor = value.read()
            value.table.forget(tensor)
            return tensor
        self.follows_calls |= isinstance(value.source, Expression)
        provenance = value.provenance()
        if provenance is None:
            return value.materialise()
        self.found[index] = provenance
        (self.withheld if value.is_withheld else self.waiting)[index] = value
        return item

    def computed(self) -> Sequence[Any]:
        """Return the inputs with all their values.

        All other deferred values of their batch are computed, too: the receiver of the inputs may
        write to them.
        """
        for handle in self._handles:
            compute_waiting(handle)
        items = list(self.inputs)
        for index, value in (*self.waiting.items(), *self.withheld.items()):
            items[index] = value.materialise()
        return items
