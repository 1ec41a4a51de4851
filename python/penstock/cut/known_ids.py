# SPDX-License-Identifier: Apache-2.0
"""The ids that a batch will look up in the embeddings of the model, as far as a cut tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock import _C
from penstock.graph.lowering import Lowering
from penstock.graph.planning import PlannedCut
from penstock.graph.recording import Name, RecordedOp

# Operators whose first two arguments are a table and the ids that are looked up in it.
_LOOKUPS = ("aten::embedding", "aten::embedding_bag", "aten::_embedding_bag")
# Operators that leave the ids and their order as they are. EmbeddingBag flattens its input so.
_SAME_IDS = ("aten::view", "aten::reshape", "aten::_unsafe_view", "aten::unsqueeze", "aten::clone")


@dataclass(frozen=True, slots=True)
class IdSource:
    """Where the ids of one lookup are found."""

    table: Any  # the parameter
    place: str | int | None  # the key of a boundary tensor, the number of a leaf, or unknown


@dataclass
class KnownIds:
    """The ids of a batch, as far as one cut that fits it tells."""

    planned: PlannedCut
    sources: list[IdSource]
    _lowering: Lowering
    _leaves: tuple[tuple[int, int], ...]  # input of the graph, tensor of the batch
    _shapes: list[tuple[int | None, ...]]  # of these; None: any
    _executor: _C.Executor | None = None

    @staticmethod
    def of(
        lowering: Lowering,
        planned: PlannedCut,
        inputs: Sequence[Any],
    ) -> KnownIds:
        """``inputs`` are the graph's, on which the cut was planned."""
        leaves = tuple(
            (index, item.leaf_index)
            for index, item in enumerate(lowering.inputs)
            if item.kind == "leaf"
        )
        keys = {item.name: item.key for item in planned.boundary}

        makers = {name: op for op in lowering.recording.ops for name in op.outputs}

        def place(name: Name) -> str | int | None:
            if name in keys:
                return keys[name]
            index = lowering.input_names.get(name)
            if index is not None:
                item = lowering.inputs[index]
                return item.leaf_index if item.kind == "leaf" else None
            maker = makers.get(name)
            if maker is None or _operator(maker) not in _SAME_IDS:
                return None
            return place(maker.args[0])

        sources = [
            IdSource(inputs[lowering.input_names[op.args[0]]], place(op.args[1]))
            for op in lowering.recording.ops
            if _operator(op) in _LOOKUPS and op.args[0] in lowering.input_names
        ]
        shapes = [
            tuple(
                None if dim in lowering.inputs[index].dynamic_dims else size
                for dim, size in enumerate(inputs[index].shape)
            )
            for index, _ in leaves
        ]
        return KnownIds(planned, sources, lowering, leaves, shapes)

    @property
    def call(self) -> tuple[int, ...]:
        """The tensors of the batch that the model is called with."""
        return tuple(leaf_index for _, leaf_index in self._leaves)

    def fits(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Whether this is the cut of a batch with these tensors, as far as they tell."""
        if self._lowering.conditions.fixed_ints:
            return False  # it also depends on numbers that are no batch's
        inputs: list[Any] = [None] * len(self._lowering.inputs)
        for (index, leaf_index), shape in zip(self._leaves, self._shapes, strict=True):
            if leaf_index >= len(leaves) or leaves[leaf_index].dim() != len(shape):
                return False
            inputs[index] = leaf = leaves[leaf_index]
            if any(
                size not in (None, is_size) for size, is_size in zip(shape, leaf.shape, strict=True)
            ):
                return False
        return self._lowering.conditions.hold(inputs)

    def ids(
        self, source: IdSource, leaves: Sequence[torch.Tensor], shipped: dict[str, torch.Tensor]
    ) -> torch.Tensor | None:
        if isinstance(source.place, int):
            return leaves[source.place]
        if source.place is None or source.place in shipped:
            return shipped.get(source.place or "")
        return self._compute(leaves).get(source.place)

    def _compute(self, leaves: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors that a worker would have sent, by key; nothing where they draw random
        numbers.
        """
        planned = self.planned
        if any(item.is_random for item in planned.boundary):
            return {}
        if self._executor is None:
            graph = _C.parse_graph(planned.prefix)
            self._executor = _C.Executor(graph, list(planned.prefix_constants))
        if self._executor.refusal(leaves) is not None:
            return {}
        with torch.inference_mode(False), torch.no_grad():
            made = self._executor.run(leaves)
        return {item.key: tensor for item, tensor in zip(planned.boundary, made, strict=True)}


def _operator(op: RecordedOp) -> str:
    return op.target.partition(".")[0]
