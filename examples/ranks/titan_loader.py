# SPDX-License-Identifier: Apache-2.0
"""torchtitan: its BaseDataLoader over its data sets, read by workers or a pool.

A configuration has `dataloader=PenstockDataLoader.Config(dataset=...)` with a data set of
torchtitan's: a `SingleDatasetConfig`, several of them in a `DatasetMixConfig` or a
`DatasetConcatConfig`, and around these perhaps a `ConcatThenSplitPackingConfig` or a
`FirstFitPackingConfig`. Sources, processors, filters and collators are torchtitan's;
`pool="tcp://host:port"` has them run by workers on other machines. All ranks have the same number
of steps, with `repeat=False` too, and the loader's state can be loaded with any number of
data-parallel ranks.

Without packing, each row is one document, and text is cut at `max_context_length` tokens. Packed
rows have `max_context_length` tokens. Then all ranks receive all documents, which workers or a pool
make once for the ranks of a process group.
"""

from __future__ import annotations

import copyreg
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import ConcatDataset, Dataset
from torchtitan.components.data import (
    ConcatThenSplitPackingConfig,
    DatasetBuildContext,
    DatasetConcatConfig,
    DatasetIterationPolicy,
    DatasetMixConfig,
    FirstFitPackingConfig,
    HuggingFaceRandomAccessSource,
    HuggingFaceStreamingSource,
    SingleDatasetConfig,
    TextCollator,
    TextSequence,
)
from torchtitan.components.data.loader import BaseDataLoader

from penstock import DataLoader, MixtureSampler, Packer, Ranks, filtered

IGNORED = -100  # torchtitan's IGNORE_INDEX
DOCUMENTS_PER_REQUEST = 16  # to a worker, with packing


@dataclass(frozen=True)
class Recipe:
    """What a data set's configuration says."""

    parts: tuple[Any, ...]  # SingleDatasetConfig
    weights: tuple[float, ...] | None = None
    too_long: str | None = None  # with packing: what becomes of a document longer than a row
    open_bins: int = 64  # rows that are filled at the same time

    @staticmethod
    def of(dataset: Any) -> Recipe:
        packing: dict[str, Any] = {}
        if isinstance(dataset, ConcatThenSplitPackingConfig):
            packing = {"too_long": "split"}
        elif isinstance(dataset, FirstFitPackingConfig):
            packing = {"too_long": "drop", "open_bins": dataset.num_packing_bins}
        if packing:
            dataset = dataset.dataset
        weights = None
        if isinstance(dataset, DatasetMixConfig):
            weights = tuple(one.weight for one in dataset.datasets)
            parts = tuple(one.dataset for one in dataset.datasets)
        elif isinstance(dataset, DatasetConcatConfig):
            parts = dataset.datasets
        else:
            parts = (dataset,)
        for part in parts:
            if not isinstance(part, SingleDatasetConfig):
                raise TypeError(
                    f"dataset must be a SingleDatasetConfig, a mixture or a concatenation of some, "
                    f"or text that is packed around these, got {type(part).__name__} in it"
                )
        return Recipe(parts, weights, **packing)


class Documents(Dataset[Any]):
    """The processed rows of a source; None for a row that a filter or the processor leaves out."""

    def __init__(self, part: Any, source: Any, context: Any) -> None:
        self.part, self.source = part, source
        self.processor = None if part.processor is None else part.processor.build(context=context)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        # numpy's generator is seeded for each sample.
        rng = np.random.default_rng(np.random.randint(1 << 31))
        row = self.source[index]
        if not all(accepts(row) for accepts in self.part.pre_filters):
            return None
        if self.processor is not None:
            row = self.processor(row, rng)
        return row if all(accepts(row) for accepts in self.part.post_filters) else None


def is_kept(row: Any) -> bool:
    return row is not None


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


class CollateDocuments:
    """Lists of documents for a packer; an empty one for each document that is left out."""

    def __init__(self, length_max: int, too_long: str) -> None:
        self.length_max, self.too_long = length_max, too_long

    def __call__(self, rows: Sequence[Any]) -> list[dict[str, Any]]:
        return [self.document(row) for row in rows]

    def document(self, row: Any) -> dict[str, Any]:
        if row is None or (self.too_long == "drop" and len(row.input_ids) > self.length_max):
            return dict.fromkeys(("input_ids", "labels"), np.zeros(0, dtype=np.int64))
        return {
            name: np.asarray(getattr(row, name), dtype=np.int64) for name in ("input_ids", "labels")
        }


class Repeated:
    """The documents of one epoch after the other; documents of two epochs may share a row."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        for epoch in itertools.count():  # the first one may be the rest of an epoch
            has_tokens = False
            for documents in self.loader:
                has_tokens = has_tokens or any(len(one["input_ids"]) for one in documents)
                yield documents
            if epoch > 0 and not has_tokens:
                raise ValueError(
                    "at least one document of an epoch must have tokens, got none; check the "
                    "processor, and too_long"
                )


class PenstockDataLoader(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        dataset: Any
        collator: Any = field(default_factory=TextCollator.Config)
        seed: int = 42
        shuffle: bool = True
        repeat: bool = True
        num_workers: int = 1
        pool: str | None = None
        # Rows of a stream have no places from which another number of ranks could continue. True
        # downloads the data sets of streams, and reads them by index.
        downloads_streams: bool = False

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
        make_picklable(tokenizer)
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
        recipe = Recipe.of(config.dataset)
        parts: list[Any] = []
        for part in recipe.parts:
            source = source_of(part, config.downloads_streams)
            parts.append(Documents(part, source.build(dataset_iteration_policy=policy), context))
        is_text = isinstance(config.collator, TextCollator.Config)
        if not is_text:  # a batch without any row may not be possible
            parts = [filtered(part, is_kept, num_workers=config.num_workers) for part in parts]
        sampler = MixtureSampler(
            [len(part) for part in parts],
            recipe.weights,
            when_exhausted="repeat" if config.repeat else "leave_out",
            shuffle=config.shuffle,
            seed=config.seed,
        )
        dataset: Any = ConcatDataset(parts)
        rows_per_batch = num_tokens_per_batch // max_context_length
        collator = config.collator.build(context=context)
        options: dict[str, Any] = {
            "sampler": sampler,
            "num_workers": config.num_workers,
            "pool": config.pool,
            "seeding": "sample",
        }
        self.repeat = config.repeat
        self.packer: Packer | None = None
        self._batches: Any = None
        if recipe.too_long is None:
            collate = CollateText(collator, max_context_length) if is_text else collator
            self.loader: DataLoader[Any] = DataLoader(
                dataset,
                rows_per_batch,
                collate_fn=collate,
                ranks=Ranks(rank=dp_rank, world_size=dp_world_size),
                **options,
            )
            return
        self.collator = collator
        self.loader = DataLoader(
            dataset,
            DOCUMENTS_PER_REQUEST,
            collate_fn=CollateDocuments(max_context_length, recipe.too_long),
            ranks=all_ranks() if config.pool or config.num_workers else None,
            generator=torch.Generator().manual_seed(config.seed),
            **options,
        )
        documents: Iterable[Any] = Repeated(self.loader) if config.repeat else self.loader
        self.packer = Packer(
            documents,
            max_context_length,
            padding={"input_ids": 0, "labels": IGNORED},
            open_bins=recipe.open_bins,
            too_long="split",
            batch_size=rows_per_batch,
            rank=dp_rank,
            world_size=dp_world_size,
        )

    def __iter__(self) -> Iterator[Any]:
        """The only iterator until a state is loaded, as of torchtitan's loader."""
        if self._batches is None:
            self._batches = self._generate()
        return self._batches

    def _generate(self) -> Iterator[Any]:
        if self.packer is not None:
            for batch in self.packer:
                rows = zip(batch["input_ids"], batch["labels"], batch["positions"], strict=True)
                yield self.collator(
                    [TextSequence(input_ids=a, labels=b, positions=c) for a, b, c in rows]
                )
            return
        yield from self.loader
        while self.repeat:  # torchtitan counts steps
            yield from self.loader

    def state_dict(self) -> dict[str, Any]:
        if self.packer is not None:
            # A tuple, into which torch.distributed.checkpoint does not descend.
            return {"packer": (self.packer.state_dict(),)}
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None
        if self.packer is not None and state_dict:
            self.packer.load_state_dict(state_dict["packer"][0])
        elif state_dict:
            self.loader.load_state_dict(state_dict)

    def close(self) -> None:
        """Ends the current epoch, and with it the loader's workers."""
        if self._batches is not None:
            self._batches.close()
        self.loader.close()


def source_of(part: Any, downloads_streams: bool) -> Any:
    source = part.source
    if not isinstance(source, HuggingFaceStreamingSource.Config):
        return source
    if not downloads_streams:
        raise TypeError(
            f"source must be read by index, got a stream of {source.path!r}; pass "
            f"downloads_streams=True, which downloads the data set, or another source"
        )
    return HuggingFaceRandomAccessSource.Config(**asdict(source))


def make_picklable(tokenizer: Any) -> None:
    """Workers of a pool, and of several ranks, receive the tokenizer with the data set."""
    if getattr(tokenizer, "_chat_template", None) is not None:
        copyreg.pickle(type(tokenizer), reduced)


def reduced(tokenizer: Any) -> tuple[Any, ...]:
    """For pickle: a tokenizer with the text of its chat template, which it keeps only compiled."""
    if tokenizer._chat_template is None:
        return rebuilt, (type(tokenizer), vars(tokenizer), None)
    folder = Path(tokenizer.tokenizer_path)
    file = folder / "chat_template.jinja"
    if file.exists():
        template = file.read_text()
    else:
        template = json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template")
    state = {**vars(tokenizer), "_chat_template": None}
    again = rebuilt(type(tokenizer), state, template or "")
    codes = [one._chat_template.root_render_func.__code__ for one in (tokenizer, again)]
    if codes[0] != codes[1]:
        raise TypeError(
            f"tokenizer must have the chat template of its files, got another one than that in "
            f"{folder}; write it to {file}"
        )
    return rebuilt, (type(tokenizer), state, template)


def rebuilt(kind: Any, state: dict[str, Any], template: str | None) -> Any:
    tokenizer = kind.__new__(kind)
    vars(tokenizer).update(state)
    if template is not None:
        tokenizer.set_chat_template(template)
    return tokenizer


def all_ranks() -> Ranks | None:
    """The ranks of the process group, which receive each document once it is made for all."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return Ranks(replica_group=range(dist.get_world_size()))
