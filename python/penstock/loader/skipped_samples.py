# SPDX-License-Identifier: Apache-2.0
"""The samples that a loader with ``on_error="skip"`` has left out of its batches.

They are counted when their batch is delivered, so a state of the loader has exactly the samples
that are missing in the batches before it, however many batches the workers have made ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.utils.data import DistributedSampler

from penstock.errors import add_note
from penstock.loader.options import LoaderOptions
from penstock.worker.partial_batch import SkipReport

logger = logging.getLogger(__name__)

_LOGGED_MAX = 10  # samples of a loader that are logged one by one


@dataclass(frozen=True, slots=True)
class SkippedSample:
    """Sample that a loader has left out of its batch; listed by ``loader.skipped``.

    ``str()`` of it is a phrase with the sample, the exception and the place.

    Attributes:
        index (int | str): Index that the sampler gave; its ``repr()`` if that is neither an int nor
            a str.
        error (str): Name of the exception's type.
        message (str): Text of the exception, up to 300 characters.
        place (str): File, line and function of the dataset where the exception was raised.
        epoch (int): Number of the epoch in which the sample first failed, from 0.
        batch (int): Number of the batch in that epoch, from 0.
        times (int): Number of times that the sample was left out so far.
    """

    index: int | str
    error: str
    message: str
    place: str
    epoch: int
    batch: int
    times: int = 1

    def __str__(self) -> str:
        again = f", {self.times} times" if self.times > 1 else ""
        error = f"{self.error}: {self.message}" if self.message else self.error
        return (
            f"sample {self.index!r} of batch {self.batch} of epoch {self.epoch}{again} "
            f"({error}; {self.place})"
        )


class SkippedSamples:
    """The samples left out over the life of a loader, and of the loaders that it was resumed from.

    Confined to the trainer's thread.
    """

    def __init__(self) -> None:
        self._samples: dict[int | str, SkippedSample] = {}
        self._epoch_count = 0  # epochs of which a batch was delivered
        self._logged_count = 0

    def __len__(self) -> int:
        return len(self._samples)

    def __contains__(self, index: int | str) -> bool:
        return index in self._samples

    @property
    def samples(self) -> tuple[SkippedSample, ...]:
        """Return each sample once, in the order in which they first failed."""
        return tuple(self._samples.values())

    @property
    def times(self) -> int:
        """Return how often samples were left out."""
        return sum(one.times for one in self._samples.values())

    def begin_epoch(self) -> int:
        """Return the number of the epoch that begins."""
        self._epoch_count += 1
        return self._epoch_count - 1

    def note(self, report: SkipReport, epoch: int, batch: int, max_skipped: int) -> None:
        for one in report.samples:
            index, error, message, place, times = one
            known = self._samples.get(index)
            if known is not None:
                self._samples[index] = replace(known, times=known.times + times)
                continue
            sample = SkippedSample(index, error, message, place, epoch, batch, times)
            self._samples[index] = sample
            self._log(sample, max_skipped)

    def _log(self, sample: SkippedSample, max_skipped: int) -> None:
        self._logged_count += 1
        if self._logged_count > _LOGGED_MAX:
            return
        is_last = self._logged_count == _LOGGED_MAX
        logger.warning(
            "penstock: %s was left out; it is number %d of at most %d%s",
            sample,
            len(self._samples),
            max_skipped,
            "; loader.skipped lists the following ones, which are not logged" if is_last else "",
        )

    def to_state(self, of_epoch: EpochSkips | None) -> dict[str, Any]:
        """Return the part of a loader's state; in the middle of the epoch ``of_epoch``, or between
        epochs."""
        is_begun = of_epoch is not None and of_epoch.is_begun
        return {
            "epoch": self._epoch_count - is_begun,
            "samples": [asdict(one) for one in self._samples.values()],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a loader's state, whose form was checked, if it lists skipped samples."""
        part = state.get("skipped")
        if part is None:
            return
        self._epoch_count = part["epoch"]
        self._samples = {one["index"]: SkippedSample(**one) for one in part["samples"]}


class EpochSkips:
    """Left-out samples of one epoch, for its iterator. Confined to the trainer's thread."""

    def __init__(self, skipped: SkippedSamples, max_skipped: int, keeps_steps: bool) -> None:
        """``keeps_steps`` if the number of batches must not change."""
        self._skipped = skipped
        self.max_skipped = max_skipped
        self._keeps_steps = keeps_steps
        self._epoch: int | None = None  # until its first batch is delivered
        self._times = self._omitted_count = 0

    @staticmethod
    def of(options: LoaderOptions, skipped: SkippedSamples) -> EpochSkips | None:
        """Return the account of an epoch that begins; None if errors of samples are raised."""
        max_skipped = options.skip_limit
        if max_skipped is None:
            return None
        samplers = (options.sampler, getattr(options.batch_sampler, "sampler", None))
        is_of_rank = any(isinstance(one, DistributedSampler) for one in samplers)
        return EpochSkips(skipped, max_skipped, options.shard_by_rank or is_of_rank)

    @property
    def is_begun(self) -> bool:
        """Return whether the epoch is under way."""
        return self._epoch is not None

    def begin(self) -> None:
        """Call before a batch is delivered."""
        if self._epoch is None:
            self._epoch = self._skipped.begin_epoch()

    def reason_to_raise(self, report: SkipReport) -> str:
        """Return why the exception of a batch must be raised; "" if its samples may be left out."""
        if report.is_omitted and self._keeps_steps:
            return (
                "on_error='skip' left no sample of this batch, and the ranks of a job take the "
                "same number of steps, so that the batch cannot be left out"
            )
        new_count = sum(one.sample_index not in self._skipped for one in report.samples)
        if len(self._skipped) + new_count <= self.max_skipped:
            return ""
        return (
            f"on_error='skip' has left out {len(self._skipped)} samples, and {new_count} more in "
            f"this batch would exceed max_skipped={self.max_skipped}; loader.skipped lists them: "
            f"repair these samples, or raise max_skipped"
        )

    def note(self, report: SkipReport, batch: int) -> None:
        """Record the samples that a batch lacks; ``batch`` is its place in the epoch."""
        assert self._epoch is not None
        self._skipped.note(report, self._epoch, batch, self.max_skipped)
        self._times += sum(one.times for one in report.samples)
        self._omitted_count += report.is_omitted

    def end(self) -> None:
        """Log the totals of the epoch. A second call does nothing."""
        times, self._times = self._times, 0
        if times == 0:
            return
        count = self._omitted_count
        omitted = f", and {count} batches without samples" if count else ""
        logger.warning(
            "penstock: epoch %d ended with %d samples left out%s; loader.skipped lists %d of at "
            "most %d",
            self._epoch,
            times,
            omitted,
            len(self._skipped),
            self.max_skipped,
        )


def note_reason(error: Exception, reason: str) -> None:
    """Add the reason why a sample's exception is raised to it, and to the log: before Python 3.11,
    exceptions have no notes."""
    add_note(error, reason)
    logger.warning("penstock: %s", reason)
