# SPDX-License-Identifier: Apache-2.0
"""Programs that advance or replace an iterator's ``_sampler_iter``, as SpeechBrain's recovery does
in its versions of ``__init__`` and ``_reset`` of torch's iterators."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sample_datasets import Computed, number
from torch.utils.data import BatchSampler, RandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter as BaseIterator

WORKERS = [0, pytest.param(2, marks=pytest.mark.slow)]
FIRST = 2  # the first batch of a recovered epoch


@pytest.fixture
def recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders whose ``skip_to`` is a number start their next epoch at that batch."""
    torchs_init, torchs_reset = BaseIterator.__init__, BaseIterator._reset

    def skip(iterator: Any, loader: Any) -> None:
        count = loader.__dict__.pop("skip_to", None)
        if count is not None:
            for _ in range(count):
                next(iterator._sampler_iter)
            iterator._num_yielded = count

    def init(self: Any, loader: Any) -> None:
        torchs_init(self, loader)
        skip(self, loader)

    def reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            torchs_reset(self, loader, first_iter)
            skip(self, loader)

    monkeypatch.setattr(BaseIterator, "__init__", init)
    monkeypatch.setattr(BaseIterator, "_reset", reset)


def epoch(loader: Any) -> list[list[float]]:
    return [batch[:, 0].tolist() for batch in loader]


@pytest.mark.usefixtures("recovery")
@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_iterator_advanced_in_init_continues_from_there(
    loader_class: Any, num_workers: int, shuffle: bool
) -> None:
    def loader() -> Any:
        generator = torch.Generator().manual_seed(3)
        options: Any = {"shuffle": shuffle, "generator": generator, "num_workers": num_workers}
        return loader_class(Computed(21, number), batch_size=4, **options)

    whole = epoch(loader())
    recovered = loader()
    recovered.skip_to = FIRST
    iterator = iter(recovered)
    assert iterator._num_yielded == FIRST
    assert epoch(iterator) == whole[FIRST:]
    second = loader()
    epoch(second)
    assert epoch(recovered) == epoch(second)


@pytest.mark.slow
@pytest.mark.usefixtures("recovery")
def test_later_epoch_of_persistent_workers_can_be_advanced(loader_class: Any) -> None:
    loader = loader_class(
        Computed(21, number), batch_size=4, num_workers=2, persistent_workers=True
    )
    whole = epoch(loader)
    loader.skip_to = FIRST
    assert epoch(loader) == whole[FIRST:]
    assert epoch(loader) == whole


@pytest.mark.parametrize("num_workers", WORKERS)
def test_order_replaced_in_reset_is_used(
    loader_class: Any, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchs_init, torchs_reset = BaseIterator.__init__, BaseIterator._reset

    def backwards(self: Any) -> None:
        self._sampler_iter = iter([*self._index_sampler][::-1])

    def init(self: Any, loader: Any) -> None:
        torchs_init(self, loader)
        backwards(self)

    def reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        torchs_reset(self, loader, first_iter)
        backwards(self)

    monkeypatch.setattr(BaseIterator, "__init__", init)
    monkeypatch.setattr(BaseIterator, "_reset", reset)
    loader = loader_class(Computed(5, number), batch_size=2, num_workers=num_workers)
    assert epoch(loader) == [[4.0], [2.0, 3.0], [0.0, 1.0]]


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("kind", [BatchSampler, RandomSampler])
def test_patched_iter_of_a_torch_sampler_defines_the_order(
    loader_class: Any, num_workers: int, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchs_iter = kind.__iter__

    def every_second(self: Any) -> Iterator[Any]:
        return itertools.islice(torchs_iter(self), 0, None, 2)

    def loader() -> Any:
        generator = torch.Generator().manual_seed(3)
        return loader_class(
            Computed(12, number),
            batch_size=2,
            shuffle=True,
            generator=generator,
            num_workers=num_workers,
        )

    whole = epoch(loader())
    monkeypatch.setattr(kind, "__iter__", every_second)
    flat = list(itertools.chain(*whole))[::2]
    expected = whole[::2] if kind is BatchSampler else [flat[i : i + 2] for i in range(0, 6, 2)]
    assert epoch(loader()) == expected
