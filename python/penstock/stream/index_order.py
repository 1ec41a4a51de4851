# SPDX-License-Identifier: Apache-2.0
"""The indices of torch's own sampler in one epoch, found without drawing from anybody's generator.

The native side draws an epoch's order for itself and keeps it. Here it is drawn once more, from a
copy of the generator as it was before the first pull, so it is the same, and nothing moves.
"""

from __future__ import annotations

import torch

from penstock.stream.batch_seeds import draw_seed
from penstock.stream.indices import IndexRecipe


class IndexOrder:
    """The batches of indices of one epoch, by place. Confined to the trainer's thread.

    To be made right before the sampler is pulled for the first time. The permutation is drawn when
    it is asked for, since few programs do: it takes eight bytes a sample.
    """

    def __init__(self, recipe: IndexRecipe) -> None:
        self._recipe = recipe
        self._permutation: torch.Tensor | None = None
        self._state: torch.Tensor | None = None
        if recipe.shuffle:
            generator = torch.default_generator if recipe.generator is None else recipe.generator
            self._state = generator.get_state()

    def batch(self, place: int) -> list[int] | None:
        """The indices of batch number ``place``, None past the last one."""
        if not 0 <= place < self._recipe.batch_count:
            return None
        first = place * self._recipe.batch_size
        end = min(first + self._recipe.batch_size, self._recipe.sample_count)
        if self._state is None:
            return list(range(first, end))
        if self._permutation is None:
            self._permutation = self._draw(self._state)
        indices: list[int] = self._permutation[first:end].tolist()
        return indices

    def _draw(self, state: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator()
        generator.set_state(state)
        if self._recipe.generator is None:  # the sampler makes one, from a seed that it draws
            generator = torch.Generator().manual_seed(draw_seed(generator))
        return torch.randperm(self._recipe.sample_count, generator=generator, device="cpu")
