# SPDX-License-Identifier: Apache-2.0
"""torchtitan: its BaseDataLoader over penstock's loader, which may read from a pool.

A model's configuration has `dataloader=PenstockDataLoader.Config(dataset_path="tokens.pt")`, with
`pool="tcp://host:port"` for workers on other machines. The loader's state can be loaded with any
number of data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader

from penstock import DataLoader, Ranks

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class Tokens(torch.utils.data.Dataset[Batch]):
    """Runs of ``seq_len`` tokens, and the tokens that follow each."""

    def __init__(self, path: str, seq_len: int) -> None:
        self.tokens = torch.load(path)
        self.seq_len = seq_len

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, index: int) -> Batch:
        run = self.tokens[index * self.seq_len : (index + 1) * self.seq_len + 1]
        return {"input": run[:-1].clone()}, run[1:].clone()


class PenstockDataLoader(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        num_workers: int = 1
        pool: str | None = None

    def __init__(
        self,
        config: Config,
        *,
        dp_rank: int,
        dp_world_size: int,
        seq_len: int,
        local_batch_size: int,
        **kwargs: Any,
    ) -> None:
        self.loader: DataLoader[Any] = DataLoader(
            Tokens(config.dataset_path or "", seq_len),
            local_batch_size,
            shuffle=True,
            num_workers=config.num_workers,
            drop_last=True,
            pool=config.pool,
            ranks=Ranks(rank=dp_rank, world_size=dp_world_size),
        )
        self._epochs: Any = None

    def __iter__(self) -> Iterator[Batch]:
        """Epoch after epoch: torchtitan counts steps."""
        self._epochs = (batch for _ in iter(int, 1) for batch in self.loader)
        return self._epochs

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self.loader.load_state_dict(state_dict)

    def close(self) -> None:
        """Ends the current epoch, and with it the loader's workers."""
        if self._epochs is not None:
            self._epochs.close()
