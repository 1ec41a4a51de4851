# SPDX-License-Identifier: Apache-2.0
"""torchtitan: its BaseDataLoader over a mixture of sources, read by workers or a pool.

A configuration has `dataloader=PenstockDataLoader.Config(sources=(...), processor=...)`, with
torchtitan's sources, processors and collators, and `pool="tcp://host:port"` for workers on other
machines. All ranks have the same number of steps, with `repeat=False` too, and the loader's state
can be loaded with any number of data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset
from torchtitan.components.data import (
    DatasetBuildContext,
    DatasetIterationPolicy,
    TextCollator,
    TextSequence,
)
from torchtitan.components.data.loader import BaseDataLoader

from penstock import DataLoader, MixtureSampler, Ranks


class Documents(Dataset[Any]):
    """The processed rows of a source; None for a row that the processor leaves out."""

    def __init__(self, source: Any, processor: Any) -> None:
        self.source, self.processor = source, processor

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        # numpy's generator is seeded for each sample.
        return self.processor(self.source[index], np.random.default_rng(np.random.randint(1 << 31)))


class CollateText:
    """torchtitan's collator over documents of at most `length_max` tokens."""

    def __init__(self, collator: Any, length_max: int) -> None:
        self.collator, self.length_max = collator, length_max

    def __call__(self, rows: Sequence[Any]) -> Any:
        end = self.length_max
        kept = [(row.input_ids[:end], row.labels[:end]) for row in rows if row is not None]
        nothing = np.zeros(0, dtype=np.int64)
        return self.collator(
            [TextSequence(input_ids=a, labels=b) for a, b in kept or [(nothing, nothing)]]
        )


class PenstockDataLoader(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        sources: tuple[Any, ...]
        processor: Any
        weights: tuple[float, ...] | None = None
        collator: Any = field(default_factory=TextCollator.Config)
        seed: int = 42
        repeat: bool = True
        num_workers: int = 1
        pool: str | None = None

    def __init__(
        self,
        config: Config,
        *,
        dp_rank: int,
        dp_world_size: int,
        tokenizer: Any,
        max_context_length: int,
        num_tokens_per_batch: int,
        **kwargs: Any,
    ) -> None:
        context = DatasetBuildContext(
            tokenizer=tokenizer,
            max_context_length=max_context_length,
            num_tokens_per_batch=num_tokens_per_batch,
            read_options=None,
        )
        policy = DatasetIterationPolicy(  # the loader shuffles and shards
            seed=config.seed,
            shuffle=False,
            repeat=False,
            dp_rank=0,
            dp_world_size=1,
            streaming_shuffle_buffer_size=0,
        )
        processor = config.processor.build(context=context)
        sources = [one.build(dataset_iteration_policy=policy) for one in config.sources]
        sampler = MixtureSampler(
            [len(source) for source in sources],
            config.weights,
            when_exhausted="repeat" if config.repeat else "leave_out",
            seed=config.seed,
        )
        self.repeat = config.repeat
        self.loader: DataLoader[Any] = DataLoader(
            ConcatDataset([Documents(source, processor) for source in sources]),
            num_tokens_per_batch // max_context_length,
            sampler=sampler,
            num_workers=config.num_workers,
            collate_fn=CollateText(config.collator.build(context=context), max_context_length),
            pool=config.pool,
            ranks=Ranks(rank=dp_rank, world_size=dp_world_size),
        )
        self._batches: Any = None

    def __iter__(self) -> Iterator[Any]:
        self._batches = self._generate()
        return self._batches

    def _generate(self) -> Iterator[Any]:
        yield from self.loader
        while self.repeat:  # torchtitan counts steps
            yield from self.loader

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self.loader.load_state_dict(state_dict)

    def close(self) -> None:
        """Ends the current epoch, and with it the loader's workers."""
        if self._batches is not None:
            self._batches.close()
