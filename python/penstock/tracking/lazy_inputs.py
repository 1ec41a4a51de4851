# SPDX-License-Identifier: Apache-2.0
"""The inputs of one call of a captured graph where some of them are lazy tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.graph.expression import Expression
from penstock.tracking.batch_origin import BatchHandle, Provenance
from penstock.tracking.lazy_tensor import LazyTensor, is_written, memory_in
from penstock.tracking.lazy_value import LazyValue, compute_waiting


@dataclass(slots=True)
class LazyInputs:
    """Ordinary tensors stand for lazy ones, but for those that are still to be computed."""

    inputs: Sequence[Any]
    waiting: dict[int, LazyValue] = field(default_factory=dict)  # by input
    withheld: dict[int, LazyValue] = field(default_factory=dict)  # by input: still with a worker
    found: dict[int, Provenance] = field(default_factory=dict)  # of those
    follows_calls: bool = False  # whether an input is a tensor that the program made from the batch
    _handles: list[BatchHandle] = field(default_factory=list)

    @classmethod
    def of(cls, inputs: Sequence[Any]) -> LazyInputs:
        """Takes the lazy tensors among `inputs` apart."""
        items = list(inputs)
        lazy = cls(items)
        for index, item in enumerate(inputs):
            if type(item) is not LazyTensor or item._value is None:
                continue
            if item.requires_grad:
                items[index] = memory_in(item)
            else:
                items[index] = lazy._taken_apart(index, item, item._value)
        return lazy

    def _taken_apart(self, index: int, item: LazyTensor, value: LazyValue) -> Any:
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
        """The inputs with all their values. Whatever else follows from their batch is computed,
        too: who is given them may write to them."""
        for handle in self._handles:
            compute_waiting(handle)
        items = list(self.inputs)
        for index, value in (*self.waiting.items(), *self.withheld.items()):
            items[index] = value.materialise()
        return items
