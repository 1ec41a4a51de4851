# SPDX-License-Identifier: Apache-2.0
"""One captured graph as Dynamo found it, or as the user's compiler left it. It runs when no cut
can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from penstock.cut.compiled_models import CompiledGraph
from penstock.graph.capture import Placeholder
from penstock.graph.lowering import Lowering


class WholeGraph:
    """Confined to the training thread."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        placeholders: Sequence[Placeholder],
        compiled: CompiledGraph | None,
    ) -> None:
        """`compiled` is the result of the user's compiler for the graph, where there is one."""
        self.graph_module = graph_module
        self.placeholders = list(placeholders)
        self.compiled = compiled
        self.run: Callable[..., Any] = (
            graph_module.forward if compiled is None else compiled.run_whole
        )

    def run_of_suffix(self, suffix: fx.GraphModule) -> Callable[..., Any]:
        """The part that stays, run by the runner of the whole."""
        return suffix.forward if self.compiled is None else self.compiled.compile_suffix(suffix)

    def writes_to_inputs(self, lowering: Lowering) -> bool:
        """Whether something is written that may lie in the memory of another input, made before
        this graph, whose value nobody knows here."""
        recording = lowering.recording
        written = recording.mutated_storages
        made_before = (*lowering.given, *lowering.waiting)
        return any(recording.forms[name].storage in written for name in made_before) or any(
            recording.forms[name].storage in written
            and index < len(self.placeholders)
            and self.placeholders[index].place == "local"
            for name, index in lowering.input_names.items()
        )
