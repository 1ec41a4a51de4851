# SPDX-License-Identifier: Apache-2.0
"""What the next ``iter()`` of a loader with persistent workers will draw, if nothing happens until
then: found out on copies of the generators, which stay as they are.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import torch

from penstock.stream.batch_seeds import EpochSeeds
from penstock.stream.indices import IndexRecipe


def draw_seed(generator: torch.Generator | None) -> int:
    """What torch's loader and its RandomSampler draw, from torch's default generator if None."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def pickle_seeds(seeds: EpochSeeds) -> bytes:
    return pickle.dumps(tuple(seeds))


@dataclass(frozen=True, slots=True)
class ExpectedEpoch:
    """The indices and seeds that an epoch will have if :meth:`is_met` says so when it begins."""

    recipe: IndexRecipe
    seeds: bytes  # of seeding="batch", else empty
    state: torch.Tensor | None  # of the generator that the sampler draws from, before that
    generator: torch.Generator | None  # a copy of the user's
    seed: int | None  # of the sampler where the user gave it no generator
    epoch_seed: int  # of what an offloaded model draws

    @staticmethod
    def after_now(
        recipe: IndexRecipe,
        base_generator: torch.Generator | None,
        next_epoch: int | None,
        next_seeds: EpochSeeds,
    ) -> ExpectedEpoch:
        """``next_epoch`` is the number of that epoch with seeding="batch", else None, and then it
        has ``next_seeds``."""
        copies: dict[int, torch.Generator] = {}

        def copy_of(generator: torch.Generator | None) -> torch.Generator:
            generator = torch.default_generator if generator is None else generator
            return copies.setdefault(id(generator), generator.clone_state())

        seeds = b""
        if next_epoch is not None:
            next_seeds = EpochSeeds(draw_seed(copy_of(base_generator)), next_epoch)
            seeds = pickle_seeds(next_seeds)
        epoch_seed = next_seeds.seed_of_draws()
        if not recipe.shuffle:
            return ExpectedEpoch(recipe, seeds, None, None, None, epoch_seed)
        copy = copy_of(recipe.generator)
        state = copy.get_state()
        if recipe.generator is not None:
            return ExpectedEpoch(recipe, seeds, state, copy, None, epoch_seed)
        return ExpectedEpoch(recipe, seeds, state, None, draw_seed(copy), epoch_seed)

    def is_met(self, recipe: IndexRecipe | None, seeds: bytes) -> bool:
        """Whether an epoch of ``recipe`` and ``seeds`` that begins now is the expected one."""
        if recipe is None or recipe != self.recipe or seeds != self.seeds:
            return False
        generator = torch.default_generator if recipe.generator is None else recipe.generator
        return self.state is None or torch.equal(self.state, generator.get_state())

    def catch_up(self) -> None:
        """Moves the generator of the sampler on by what was drawn for the epoch so far."""
        if self.generator is not None:
            assert self.recipe.generator is not None
            self.recipe.generator.set_state(self.generator.get_state())
        elif self.recipe.shuffle:
            draw_seed(None)
