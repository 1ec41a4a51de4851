# SPDX-License-Identifier: Apache-2.0
"""The parts around the loaders of the compared systems: a job, its loader and the state, and the
adapters by which each system reads the same samples."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from samples import KINDS, Sample, Samples

Collate = Callable[[list[Sample]], Any]


class Missing(Exception):
    """The system has no interface for it; the message names the absent part."""


@dataclass(frozen=True, slots=True)
class Job:
    """The task of a loader."""

    kind: str
    folder: str
    workers: int = 2
    seed: int = 7
    rank: int = 0
    ranks: int = 1
    by_rank: bool = False  # as a part of a job of `ranks` ranks, even if that is one
    is_endless: bool = False  # full batches for a rate; order does not matter
    service: str = ""  # the address of workers that run already

    @property
    def samples(self) -> Samples:
        return KINDS[self.kind](Path(self.folder))


class Loader:
    """Batches of an epoch, and the place in it."""

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def state(self) -> Any:
        raise Missing("no state of an iterator")

    def load(self, state: Any) -> None:
        raise Missing("no state of an iterator")


class TorchDataset:
    """Samples as tensors, for loaders that take a dataset of torch."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return as_tensors(self.samples[index])


class TorchLoader(Loader):
    """A loader that can be iterated over again, and may have torchdata's methods for states."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def state(self) -> Any:
        if not hasattr(self._loader, "state_dict"):
            raise Missing("no state_dict()")
        return self._loader.state_dict()

    def load(self, state: Any) -> None:
        self._loader.load_state_dict(state)


class GrainLoader(Loader):
    def __init__(self, dataset: Any) -> None:
        self._iterator = iter(dataset)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._iterator)

    def state(self) -> Any:
        return self._iterator.get_state()

    def load(self, state: Any) -> None:
        self._iterator.set_state(state)


class SpdlLoader(Loader):
    """Threads of this process, epoch after epoch."""

    def __init__(
        self, sampler: Any, dataset: Any, collate: Collate, batch_size: int, workers: int
    ) -> None:
        from spdl.pipeline import PipelineBuilder

        def source() -> Iterator[int]:
            for epoch in itertools.count():
                sampler.shuffle(epoch)
                yield from sampler

        def batch(indices: list[int]) -> Any:
            return collate([dataset[index] for index in indices])

        builder = PipelineBuilder().add_source(source())
        builder = builder.aggregate(batch_size, drop_last=True)
        builder = builder.pipe(batch, concurrency=workers).add_sink(4)
        self._pipeline = builder.build(num_threads=workers)

    def __iter__(self) -> Iterator[Any]:
        with self._pipeline.auto_stop():
            yield from self._pipeline.get_iterator()


class RayLoader(Loader):
    def __init__(self, dataset: Any, batch_size: int, collate: Any, job: Job) -> None:
        self._dataset, self._collate, self._job = dataset, collate, job
        self._batch_size = batch_size
        if job.by_rank:
            raise Missing("streaming_split() serves ranks, and no iterator has a state")

    def __iter__(self) -> Iterator[Any]:
        arguments: dict[str, Any] = {} if self._collate is None else {"collate_fn": self._collate}
        batches: Iterator[Any] = iter(
            self._dataset.iter_torch_batches(
                batch_size=self._batch_size,
                prefetch_batches=2,
                drop_last=self._job.is_endless,
                **arguments,
            )
        )
        return batches


class TfLoader(Loader):
    def __init__(self, dataset: Any) -> None:
        self._iterator = iter(dataset)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._iterator)

    def state(self) -> Any:
        import tensorflow as tf

        with tempfile.TemporaryDirectory() as folder:
            tf.train.Checkpoint(iterator=self._iterator).write(f"{folder}/state")
            return {path.name: path.read_bytes() for path in Path(folder).iterdir()}

    def load(self, state: Any) -> None:
        import tensorflow as tf

        with tempfile.TemporaryDirectory() as folder:
            for name, content in state.items():
                (Path(folder) / name).write_bytes(content)
            tf.train.Checkpoint(iterator=self._iterator).read(f"{folder}/state").assert_consumed()


class Stored:
    """The source of a pipeline whose next stage makes samples."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Sample:
        return self._samples.stored(int(index))


class GrainMake:
    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __call__(self, stored: Sample, rng: Any) -> Sample:
        sample = self._samples.make(stored, rng)
        return {name: np.asarray(value) for name, value in sample.items()}


class RayMake:
    """An actor's callable, so that the dataset is unpickled once for each worker."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __call__(self, row: Sample) -> Sample:
        sample = self._samples[row["id"]]
        return {name: np.asarray(value) for name, value in sample.items()}


class WithNumber:
    def __init__(self, numbers: dict[str, int]) -> None:
        self._numbers = numbers

    def __call__(self, row: Sample) -> Sample:
        return {"id": self._numbers[row["path"]], "image": row["image"]}


class FromColumns:
    """A collate function for batches that come as columns."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, columns: dict[str, Any]) -> Any:
        names = list(columns)
        rows = zip(*columns.values(), strict=True)
        return self._collate([dict(zip(names, row, strict=True)) for row in rows])


class TorchCollate:
    """A collate function of arrays, whose results become tensors."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, samples: list[Sample]) -> Any:
        return as_tensors(self._collate(samples))


def torch_collate(samples: Samples) -> Any:
    from torch.utils.data import default_collate

    own = type(samples).collate
    return default_collate if own is None else TorchCollate(own)


def as_tensors(sample: Sample) -> Sample:
    import torch

    return {
        name: torch.from_numpy(np.require(value, requirements="W"))
        if isinstance(value, np.ndarray)
        else value
        for name, value in sample.items()
    }
