# SPDX-License-Identifier: Apache-2.0
"""Leave samples that raise an exception out of their batch, for ``on_error="skip"``.

The dataset and ``collate_fn`` are wrapped. An exception of a sample becomes a :class:`FailedSample`
in the sample's place, so any fetcher continues with the next sample; ``collate_fn`` receives the
others, and its result is returned as a :class:`PartialBatch`. No sample is fetched twice, so the
other samples draw the same random numbers as without ``on_error``. Other exceptions, such as those
of ``collate_fn``, are raised.

A dataset with ``__getitems__`` raises for the batch as a whole. It is then asked for each sample
separately to find the failing ones, and for the rest of the batch once more.

A worker describes the failures in a :class:`SkipReport`, which it sends in the place of the
dataset's state and with that state in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from penstock.compat.iterators import pin_memory
from penstock.errors import PenstockError
from penstock.stream.batch_seeds import PlacedIndex
from penstock.worker.threaded_fetch import fetches_whole_batches

# They are not about the sample: memory is short, or an iteration ends.
_NEVER_SKIPPED = (MemoryError, torch.OutOfMemoryError, StopIteration, StopAsyncIteration)
TEXT_MAX = 300  # characters of each text about a failure
_LIBRARIES = ("penstock", "torch")


@dataclass(slots=True, eq=False)
class FailedSample:
    """Takes the place of a sample whose dataset raised ``error``.

    The error's frames lead to the variables of the fetcher, and so back to this object: it must be
    dropped when it is described, or it lives until the next garbage collection, and the batch too.
    """

    index: Any  # as passed to the dataset
    error: Any  # an Exception; None once it is dropped


@dataclass(frozen=True, slots=True, eq=False)
class _PartialSamples:
    """Result of a dataset for a batch of which some samples failed."""

    samples: Any  # of the others, as the dataset returned them; None without any
    failures: tuple[FailedSample, ...]
    is_empty: bool


@dataclass(frozen=True, slots=True, eq=False)
class PartialBatch:
    """Batch that lacks the samples of ``failures``, which are in the order of the batch."""

    batch: Any  # None if no sample is left
    failures: tuple[FailedSample, ...]
    is_omitted: bool  # no sample is left

    def pin_memory(self) -> PartialBatch:
        """Pin the batch, as torch's iterator does with objects that have this method."""
        return replace(self, batch=pin_memory(self.batch))

    def drop_errors(self) -> None:
        """Drop the exceptions of the failures; call when they are described."""
        _drop_errors(self.failures)


def _drop_errors(failures: Iterable[FailedSample]) -> None:
    for one in failures:
        one.error = None


def without_errors(made: Any) -> None:
    """Drop the exceptions of a batch that was made and is not used."""
    if type(made) is PartialBatch:
        made.drop_errors()


def skipping(
    dataset: Any, collate_fn: Callable[[Any], Any]
) -> tuple[SkippingDataset, SkippingCollate]:
    """Wrap the parts of a map-style fetcher so that it returns a :class:`PartialBatch` where
    samples fail."""
    kind = _SkippingBatches if fetches_whole_batches(dataset) else SkippingDataset
    return kind(dataset), SkippingCollate(collate_fn)


class SkippingDataset:
    """Map-style dataset that returns a :class:`FailedSample` instead of raising. As thread-safe as
    the dataset."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        try:
            return self._dataset[index]
        except _NEVER_SKIPPED:
            raise
        except Exception as error:
            failed_index = index.index if type(index) is PlacedIndex else index
            return FailedSample(failed_index, error)  # format_sample() reads the variable, too


class _SkippingBatches(SkippingDataset):
    """Dataset with ``__getitems__``."""

    def __getitems__(self, indices: Any) -> Any:
        try:
            return self._dataset.__getitems__(indices)
        except _NEVER_SKIPPED:
            raise
        except Exception as error:
            return self._without_failed(list(indices), error)

    def _without_failed(self, indices: list[Any], error: Exception) -> Any:
        """Return the samples that can be fetched; none of them if the failing ones cannot be told
        apart."""
        failures = [self._failure_of(index) for index in indices]
        kept = [index for index, one in zip(indices, failures, strict=True) if one is None]
        failed = tuple(one for one in failures if one is not None)
        try:
            if kept:
                samples = self._dataset.__getitems__(kept)
                return _PartialSamples(samples, failed, is_empty=False) if failed else samples
        except _NEVER_SKIPPED:
            raise
        except Exception:
            failed = tuple(FailedSample(index, error) for index in indices)
        return _PartialSamples(None, failed, is_empty=True)

    def _failure_of(self, index: Any) -> FailedSample | None:
        try:
            self._dataset.__getitems__([index])
        except _NEVER_SKIPPED:
            raise
        except Exception as error:
            failed_index = index
            return FailedSample(failed_index, error)
        return None


class SkippingCollate:
    """Calls ``collate_fn`` with the samples that did not fail."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, samples: Any) -> Any:
        if type(samples) is FailedSample:  # without automatic batching
            return PartialBatch(None, (samples,), is_omitted=True)
        if type(samples) is _PartialSamples:
            return self._partial(samples.samples, samples.failures, samples.is_empty)
        if type(samples) is list:
            failures = tuple(one for one in samples if type(one) is FailedSample)
            if failures:
                kept = [one for one in samples if type(one) is not FailedSample]
                return self._partial(kept, failures, not kept)
        return self._collate_fn(samples)

    def _partial(
        self, samples: Any, failures: tuple[FailedSample, ...], is_empty: bool
    ) -> PartialBatch:
        try:
            batch = None if is_empty else self._collate_fn(samples)
        except BaseException:
            _drop_errors(failures)
            raise
        return PartialBatch(batch, failures, is_empty)


class SampleFailure(NamedTuple):
    """Description of a failed sample. All texts are short, and can be encoded."""

    sample_index: int | str  # its repr() if it is neither an int nor a str
    error: str  # name of the exception's type
    message: str
    place: str  # file, line and function of the dataset
    times: int  # in the batch, to which a sampler may give an index twice


class SkipReport(NamedTuple):
    """Facts that travel with a batch if samples are skipped. Picklable."""

    number: int  # of the request
    is_omitted: bool  # no sample is left, and the answer has no batch
    samples: tuple[SampleFailure, ...]  # none of them twice; empty if none failed
    error: Any  # the exception of the first one, in the form of this kind of worker
    state: bytes | None = None  # of the dataset after the batch

    def to_plain(self) -> tuple[Any, ...]:
        """Return the report of a pool's worker, where no dataset has a state, as plain values."""
        return (self.number, self.is_omitted, tuple(map(tuple, self.samples)), tuple(self.error))

    @staticmethod
    def of_plain(value: Any) -> SkipReport:
        """Read the result of :meth:`to_plain`, which is not trusted. Raise PenstockError if it is
        another value."""
        try:
            number, is_omitted, samples, (name, text) = value
            report = SkipReport(
                number, is_omitted, tuple(SampleFailure(*one) for one in samples), (name, text)
            )
        except (TypeError, ValueError):
            _refuse_report()
        texts = [name, text, *(part for one in report.samples for part in one[1:4])]
        counts = [number, *(one.times for one in report.samples)]
        if not (
            type(is_omitted) is bool
            and all(type(one.sample_index) in (int, str) for one in report.samples)
            and all(type(one) is str for one in texts)
            and all(type(one) is int and one >= 0 for one in counts)
            and all(_is_short(part) for one in report.samples for part in _texts_of(one))
        ):
            _refuse_report()
        return report


def _texts_of(sample: SampleFailure) -> Iterable[str]:
    return (part for part in sample if isinstance(part, str))


def _is_short(text: str) -> bool:
    return len(text) <= TEXT_MAX and len(text.splitlines()) <= 1


def _refuse_report() -> NoReturn:
    raise PenstockError(
        "a worker sent a batch with on_error='skip' and no list of the samples that it skipped; "
        "trainer and workers must run the same version of penstock"
    )


def described(failures: Iterable[FailedSample], count_max: int) -> tuple[SampleFailure, ...]:
    """Describe the failed samples of a batch, each once, and at most ``count_max``."""
    found: dict[int | str, SampleFailure] = {}
    for failure in failures:
        index = _plain_index(failure.index)
        known = found.get(index)
        if known is not None:
            found[index] = known._replace(times=known.times + 1)
        elif len(found) < count_max:
            error = failure.error
            found[index] = SampleFailure(
                index, _type_name(error), _text_of(str, error), _place_of(error), 1
            )
    return tuple(found.values())


def _plain_index(index: Any) -> int | str:
    if isinstance(index, (int, np.integer)):
        return int(index)
    return _short(index) if type(index) is str else _text_of(repr, index)


def _type_name(error: Exception) -> str:
    cls = type(error)
    is_builtin = cls.__module__ == "builtins"
    return _short(cls.__qualname__ if is_builtin else f"{cls.__module__}.{cls.__qualname__}")


def _text_of(make: Callable[[Any], str], value: Any) -> str:
    try:
        return _short(make(value))
    except Exception as error:  # of the user's class
        return f"<{type(error).__name__} in {make.__name__}()>"


def _short(text: str) -> str:
    """Return the text in one line that can be encoded, of a limited length."""
    text = " ".join(text.splitlines()).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= TEXT_MAX else f"{text[: TEXT_MAX - 3]}..."


def _place_of(error: Exception) -> str:
    """Return the outermost line outside of penstock and torch, which is the dataset's; the
    innermost line if the dataset is torch's."""
    traceback, place = error.__traceback__, ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        place = f"{os.path.basename(code.co_filename)}:{traceback.tb_lineno}, in {code.co_name}"
        name = str(traceback.tb_frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in _LIBRARIES:
            break
        traceback = traceback.tb_next
    return _short(place)
