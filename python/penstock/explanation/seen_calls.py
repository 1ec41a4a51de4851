# SPDX-License-Identifier: Apache-2.0
"""A program's calls while its model was looked for and not found, and how to tell them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

# After this many batches for which a model was called, but with other tensors, it will not come.
FOREIGN_BATCHES_MAX = 16
MODELS_SHOWN_MAX = 3


@dataclass
class SeenCalls:
    """Counts batches, and calls of models that were not the one looked for."""

    batch_count: int = 0
    _foreign: Counter[str] = field(default_factory=Counter)  # calls with other tensors, by model
    _first_tensors: dict[str, str] = field(default_factory=dict)  # of those calls, by model
    _foreign_batches: set[int] = field(default_factory=set)
    _without_parameters: dict[str, None] = field(default_factory=dict)

    def note_without_parameters(self, module: str) -> None:
        """A module that cannot be the model was called with a tensor of a batch."""
        self._without_parameters[module] = None

    def note_foreign(self, model: str, tensors: str) -> None:
        """A model was called with `tensors`, none of which is of a batch as it came."""
        self._foreign[model] += 1
        self._first_tensors.setdefault(model, tensors)
        self._foreign_batches.add(self.batch_count)

    @property
    def is_hopeless(self) -> bool:
        return len(self._foreign_batches) >= FOREIGN_BATCHES_MAX

    def __str__(self) -> str:
        """One sentence: the calls that were seen, and the remedy."""
        batches = f"{self.batch_count} batch{'es were' if self.batch_count != 1 else ' was'}"
        if not self.batch_count:
            return (
                "no batch was delivered by a DataLoader in the program's own process, and others "
                "that it starts are not watched; let it train in its own"
            )
        if not self._foreign:
            called = ", ".join(self._without_parameters)
            seen = f"only {called} was called, without parameters" if called else "none was called"
            return (
                f"{batches} delivered, but no model to explain: {seen}; let the program call a "
                "torch.nn.Module that has parameters with the tensors of a batch"
            )
        calls = "; ".join(
            f"{model} was called {count} time{'s' if count > 1 else ''}, first with "
            f"{self._first_tensors[model]}"
            for model, count in self._foreign.most_common(MODELS_SHOWN_MAX)
        )
        return (
            f"{batches} delivered, but no model was called with a tensor of one, or with one that "
            f"follows from one by operators that can be followed (random ones, indexing and other "
            f"libraries cannot; nor can the first batch): {calls}; do it in the model's forward or "
            "in the dataset"
        )
