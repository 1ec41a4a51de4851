# SPDX-License-Identifier: Apache-2.0
"""Samples of several sources in given shares."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from penstock import _C
from penstock.sampling.epoch_sampler import EpochSampler, drawn_order

WhenExhausted = Literal["stop", "repeat", "leave_out"]
_CHOICES = ("stop", "repeat", "leave_out")
_SOURCES_MAX = 1 << 16
_WHOLE = _C.MixtureSchedule.WHOLE


@dataclass(slots=True)
class _MixturePlace:
    epoch: int
    schedule: _C.MixtureSchedule
    passes: list[int]  # over each source
    positions: list[int]  # in the current pass
    given_count: int = 0
    is_over: bool = False  # a source that stops the epoch has ended
    orders: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)  # of passes, by source


class MixtureSampler(EpochSampler[int, _MixturePlace]):
    """Sample indices into a ``ConcatDataset`` of several sources, each with a given share.

    After every n samples each source has given its share of n, at most one sample more or less (R.
    Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980). The order depends
    only on the arguments, the seed and the epoch: it is the same on every machine, for any number
    of ranks and workers. Works with torch's and penstock's loaders. Each iteration is the next
    epoch, starting with epoch 0; :meth:`set_epoch` selects another.

    Args:
        lengths (Sequence[int]): Number of samples of each source. 1 to 65536 sources.
        weights (Sequence[float] | None): Share of each source: a finite number of 0 or more, where
            0 excludes the source. The sum need not be 1. Default: None, shares proportional to
            ``lengths``.
        when_exhausted (str): What happens when the source selected next has given all of its
            samples: ``"stop"`` ends the epoch, ``"repeat"`` starts another pass over the source, in
            another order, and ``"leave_out"`` divides its share among the other sources. Default:
            ``"stop"``.
        num_samples (int | None): Length of an epoch, 0 or more; with ``"stop"`` an epoch ends
            earlier if a source does. Default: None, which means until ``"stop"`` ends the epoch,
            and the sum of ``lengths`` with ``"repeat"`` and ``"leave_out"``.
        shuffle (bool): Use a random order in each pass over a source, drawn from ``seed``, the
            epoch and the number of the pass. False: in sequence. Default: True.
        seed (int): Seed of the orders, 0 or more, the same on all ranks of a job. Default: 0.

    Raises:
        ValueError: If an argument has an invalid value, all weights are 0, or a source with a
            weight has no samples.

    Example::

        sampler = penstock.MixtureSampler([len(a), len(b)], weights=[0.7, 0.3])
        loader = penstock.DataLoader(ConcatDataset([a, b]), batch_size=64, sampler=sampler)
    """

    def __init__(
        self,
        lengths: Sequence[int],
        weights: Sequence[float] | None = None,
        *,
        when_exhausted: WhenExhausted = "stop",
        num_samples: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self.lengths = _checked_lengths(lengths)
        if when_exhausted not in _CHOICES:
            raise ValueError(
                f"when_exhausted must be one of {', '.join(map(repr, _CHOICES))}, got "
                f"{when_exhausted!r}"
            )
        if num_samples is not None and num_samples < 0:
            raise ValueError(f"num_samples must be >= 0, got {num_samples}")
        self.when_exhausted = when_exhausted
        self.num_samples = num_samples
        self._offsets = np.cumsum([0, *self.lengths[:-1]]).tolist()
        self._weights = self._checked_weights(self.lengths if weights is None else weights)
        self._chosen_weights: list[float] = []  # by set_weights()
        # Length of an epoch, with the arguments that it follows from.
        self._known_length: tuple[tuple[int | None, tuple[float, ...]], int] | None = None
        super().__init__(shuffle, seed)

    def __repr__(self) -> str:
        parts = [reprlib.repr(self.lengths)]
        if self._weights != self.lengths:
            parts.append(f"weights={reprlib.repr(self._weights)}")
        if self.when_exhausted != "stop":
            parts.append(f"when_exhausted={self.when_exhausted!r}")
        if self.num_samples is not None:
            parts.append(f"num_samples={self.num_samples}")
        return f"{type(self).__name__}({', '.join([*parts, *self._shown_order()])})"

    @property
    def weights(self) -> list[float]:
        """Weights in use, one per source."""
        return list(self._weights)

    def set_weights(self, weights: Sequence[float]) -> None:
        """Change the shares of the samples that follow, in this epoch and later ones.

        The weights stay in use when a state is loaded later. Because a loader requests batches
        ahead, the first sample with the new shares is not known in advance. To choose it, take the
        loader's state, set the weights and load the state. (The first state of a loader with
        workers includes the indices of the batches in flight, which are delivered first; take a
        state before the first batch to have none.)

        Args:
            weights (Sequence[float]): One weight per source, as for the constructor.

        Raises:
            ValueError: If the weights are invalid, as for the constructor.
        """
        self._weights = self._chosen_weights = self._checked_weights(weights)
        self._place.schedule = _schedule_of(self._weights)

    def __len__(self) -> int:
        """Return the number of samples of an epoch with the weights in use.

        With ``when_exhausted="stop"`` the schedule is followed to count them, in time proportional
        to the reciprocal of the smallest share; the result is kept until the weights or
        ``num_samples`` change.

        Returns:
            int: Number of samples, over all sources.
        """
        if self.when_exhausted == "repeat":
            return sum(self.lengths) if self.num_samples is None else self.num_samples
        key = (self.num_samples, tuple(self._weights))
        if self._known_length is None or self._known_length[0] != key:
            whole = self._whole_length()
            self._known_length = key, whole if key[0] is None else min(key[0], whole)
        return self._known_length[1]

    def _whole_length(self) -> int:
        """Return the length of an epoch that no number of samples ends."""
        sources = zip(self.lengths, self._weights, strict=True)
        read = [length for length, weight in sources if weight]
        if self.when_exhausted == "leave_out":
            return sum(read)
        shares = _C.MixtureSchedule.shares_of([weight for weight in self._weights if weight])
        return _C.MixtureSchedule.samples_until_end(shares, read)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, for another sampler with the same sources.

        Returns:
            dict[str, Any]: JSON-serializable.
        """
        place = self._place
        return {
            "epoch": place.epoch,
            "seed": self.seed,
            "lengths": list(self.lengths),
            "weights": list(self._weights),
            "given": place.given_count,
            "is_over": place.is_over,
            "passes": list(place.passes),
            "positions": list(place.positions),
            "shares": place.schedule.shares,
            "lags": place.schedule.lags,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state: the next iteration continues where it was taken.

        The weights are taken from the state, unless :meth:`set_weights` has set others.

        Args:
            state (dict[str, Any]): Result of :meth:`state_dict` of a sampler with the same
                ``lengths`` and ``seed``.

        Raises:
            ValueError: If the state has other lengths or another seed, or is inconsistent.
        """
        self._check_state(state, lengths=self.lengths, seed=self.seed)
        count = len(self.lengths)
        lists = [state[name] for name in ("weights", "passes", "positions", "shares", "lags")]
        if any(len(one) != count for one in lists) or sum(state["shares"]) != _WHOLE:
            raise ValueError(
                f"the state must have consistent weights, positions and shares of {count} sources; "
                f"load a result of state_dict()"
            )
        self._weights = self._chosen_weights or list(state["weights"])
        schedule = _C.MixtureSchedule(state["shares"], state["lags"])
        if self._weights != state["weights"]:
            schedule = _schedule_of(self._weights)
        self._begin_at(
            _MixturePlace(
                state["epoch"],
                schedule,
                list(state["passes"]),
                list(state["positions"]),
                state["given"],
                state["is_over"],
            )
        )

    def _first_place(self, epoch: int) -> _MixturePlace:
        count = len(self.lengths)
        return _MixturePlace(epoch, _schedule_of(self._weights), [0] * count, [0] * count)

    def _rest(self, place: _MixturePlace) -> Iterator[int]:
        while (index := self._next(place)) is not None:
            yield index

    def _next(self, place: _MixturePlace) -> int | None:
        end = self.num_samples
        if end is None and self.when_exhausted != "stop":
            end = sum(self.lengths)
        if place.is_over or (end is not None and place.given_count >= end):
            return None
        source = place.schedule.next()
        while place.positions[source] == self.lengths[source]:
            if self.when_exhausted == "stop":
                place.is_over = True
                return None
            if self.when_exhausted == "repeat":
                place.positions[source] = 0
                place.passes[source] += 1
                place.orders.pop(source, None)
                continue
            left = [
                weight if position < length else 0.0
                for weight, position, length in zip(
                    self._weights, place.positions, self.lengths, strict=True
                )
            ]
            if not any(left):
                return None
            place.schedule = _schedule_of(left)
            source = place.schedule.next()
        position = place.positions[source]
        place.positions[source] += 1
        place.given_count += 1
        return int(self._offsets[source]) + self._index(place, source, position)

    def _index(self, place: _MixturePlace, source: int, position: int) -> int:
        if not self.shuffle:
            return position
        if source not in place.orders:
            of_pass = (place.epoch, source, place.passes[source])
            place.orders[source] = drawn_order(self.lengths[source], self.seed, of_pass)
        return int(place.orders[source].item(position))

    def _checked_weights(self, weights: Sequence[float]) -> list[float]:
        found = [float(weight) for weight in weights]
        if len(found) != len(self.lengths):
            raise ValueError(
                f"weights must have one number for each of the {len(self.lengths)} sources, got "
                f"{len(found)}"
            )
        for source, (weight, length) in enumerate(zip(found, self.lengths, strict=True)):
            if not math.isfinite(weight) or weight < 0:
                raise ValueError(
                    f"weights must be finite and >= 0, got {weight} for source {source}"
                )
            if weight > 0 and length == 0:
                raise ValueError(
                    f"source {source} has weight {weight} and no samples; give it weight 0 or "
                    f"leave it out"
                )
        if not any(found):
            raise ValueError("at least one weight must be > 0, got only 0")
        return found


def _schedule_of(weights: Sequence[float]) -> _C.MixtureSchedule:
    shares = _C.MixtureSchedule.shares_of(weights)
    return _C.MixtureSchedule(shares, [0] * len(shares))


def _checked_lengths(lengths: Sequence[int]) -> list[int]:
    found = [int(length) for length in lengths]
    if not 1 <= len(found) <= _SOURCES_MAX:
        raise ValueError(f"lengths must have 1 to {_SOURCES_MAX} sources, got {len(found)}")
    for source, length in enumerate(found):
        if length < 0:
            raise ValueError(f"lengths must be >= 0, got {length} for source {source}")
    return found
