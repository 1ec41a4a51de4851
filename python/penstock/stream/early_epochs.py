# SPDX-License-Identifier: Apache-2.0
"""When the next epoch is asked for before it begins, and whether what came of it is used."""

from __future__ import annotations

import torch

from penstock import _C
from penstock.stream.batch_seeds import EpochSeeds
from penstock.stream.expected_epoch import ExpectedEpoch
from penstock.stream.indices import IndexRecipe


class EarlyEpochs:
    """Of one iterator. Confined to the trainer's thread."""

    def __init__(self, *, is_allowed: bool) -> None:
        self.is_allowed = is_allowed
        self.answers_before: float = float("inf")  # so many, then begin() is worth a call
        self._is_met = True  # the last expectation; before there is one, hope
        self._expected: ExpectedEpoch | None = None
        self._recipe: IndexRecipe | None = None

    def note_epoch(
        self,
        recipe: IndexRecipe | None,
        asked_ahead: int,
        base_generator: torch.Generator | None,
        next_epoch: int | None,
        next_seeds: EpochSeeds,
    ) -> None:
        """An epoch begins, of which ``asked_ahead`` batches are asked for ahead. ``next_epoch`` is
        the number of the one after it with seeding="batch", else None, and then it has
        ``next_seeds``.
        """
        self._recipe = recipe
        self._base_generator = base_generator
        self._next_epoch = next_epoch
        self._next_seeds = next_seeds
        self.answers_before = float("inf")
        if recipe is not None and self.is_allowed:
            self.answers_before = max(1, recipe.batch_count + 1 - asked_ahead)

    def begin(self, client: _C.Client) -> None:
        """Asks for batches of the next epoch, if all of this one were asked for.

        Where that was in vain the last time it is only expected, and asked for again after the
        first expectation that is met.
        """
        if not client.has_stream_ended():
            return
        self.answers_before = float("inf")
        assert self._recipe is not None
        expected = ExpectedEpoch.after_now(
            self._recipe, self._base_generator, self._next_epoch, self._next_seeds
        )
        self._expected = expected
        if self._is_met:
            recipe = self._recipe._replace(generator=expected.generator)
            client.begin_early(
                expected.seeds,
                **recipe._asdict(),
                seed=expected.seed,
                epoch_seed=expected.epoch_seed,
            )

    def try_adopt(self, client: _C.Client, recipe: IndexRecipe | None, seeds: bytes) -> bool:
        """Begins the epoch of ``recipe`` and ``seeds`` with what was asked for early, if it is the
        expected one.
        """
        expected, self._expected = self._expected, None
        if expected is None:
            return False
        is_begun, self._is_met = self._is_met, expected.is_met(recipe, seeds)
        if not (is_begun and self._is_met):
            return False
        expected.catch_up()
        client.adopt_early(expected.recipe.generator)
        return True

    def forget(self) -> None:
        """The client that was asked is gone."""
        self._expected = None
