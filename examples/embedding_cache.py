# SPDX-License-Identifier: Apache-2.0
"""Trains an embedding table in a slow file behind a cache that asks the loader for the next ids.

Clicks are in the order of time, and an item that is no longer clicked on stays forgotten. A cache
that knows the next LIFE batches therefore evicts the right rows, as an oracle would that knows the
whole epoch: `penstock.BeladyCache`.
"""

from __future__ import annotations

import tempfile
import time

import torch
from torch.utils.data import TensorDataset

from penstock import BeladyCache, DataLoader

ITEMS, WIDTH, CLICKS, BATCH, LIFE = 1000, 16, 6400, 64, 10  # an item lives for LIFE batches
CACHED_ROWS = 70
READ_S = 0.0002  # how long the table takes to give a row, as a disk or another machine would


class CachedTable:
    """An embedding table in a file, and the rows of it that are in memory."""

    def __init__(self, file, cached_rows):
        self.table = torch.from_file(file.name, shared=True, size=ITEMS * WIDTH).view(ITEMS, WIDTH)
        torch.nn.init.normal_(self.table, generator=torch.Generator().manual_seed(1))
        self.cache, self.rows = BeladyCache(cached_rows), torch.empty(cached_rows, WIDTH)

    def look_up(self, ids, coming):
        """The rows of ``ids``; ``coming`` are the ids of the next batches, as far as known."""
        step = self.cache.read(ids, coming)
        found, is_held = torch.empty(len(ids), WIDTH), step.slots >= 0
        found[is_held] = self.rows[step.slots[is_held]]
        time.sleep(READ_S * int((~is_held).sum()))
        found[~is_held] = self.table[ids[~is_held]]
        self.rows[step.kept_slots[step.kept_slots >= 0]] = found[step.kept_slots >= 0]
        return found

    def update(self, ids, rows):
        self.table[ids] = rows
        slots = self.cache.slots(ids)
        self.rows[slots[slots >= 0]] = rows[slots >= 0]


def clicks():
    alive = LIFE * BATCH * ITEMS / CLICKS
    newest = torch.arange(CLICKS) / CLICKS * (ITEMS - alive) + alive - 1
    age = torch.rand(CLICKS, generator=torch.Generator().manual_seed(2)) ** 2
    items = (newest - age * (1 - 1 / LIFE) * alive).long()
    return TensorDataset(items, (items % 7 < 3).float())


def unique(batches):
    """A batch reads each of its rows once."""
    return [items.unique() for items in batches]


def train(cached_rows, coming_of):
    torch.manual_seed(0)
    loader = DataLoader(clicks(), batch_size=BATCH, num_workers=2, prefetch_factor=LIFE // 2)
    with tempfile.NamedTemporaryFile() as file:
        table, head, losses = CachedTable(file, cached_rows), torch.nn.Linear(WIDTH, 1), []
        for step, (items, clicked) in enumerate(loader):
            ids, places = items.unique(return_inverse=True)
            rows = table.look_up(ids, coming_of(loader, step)).requires_grad_()
            logits = head(rows[places]).squeeze(1)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, clicked)
            loss.backward()
            with torch.no_grad():
                table.update(ids, rows - rows.grad)
                for parameter in head.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            losses.append(loss.item())
    return losses, table.cache.hits / (table.cache.hits + table.cache.misses)


if __name__ == "__main__":
    every_batch = [items for items, _ in DataLoader(clicks(), batch_size=BATCH)]
    ways = {
        "without look-ahead": lambda loader, step: [],
        "with look-ahead": lambda loader, step: unique(
            loader.lookahead(LIFE, lambda batch: batch[0])
        ),
        "an oracle": lambda loader, step: unique(every_batch[step + 1 :]),
    }
    losses, _ = train(0, ways["without look-ahead"])
    print(f"Lookups that need no read, with a cache of {CACHED_ROWS} of {ITEMS} rows:")
    for way, coming_of in ways.items():
        losses_with_cache, ratio = train(CACHED_ROWS, coming_of)
        assert losses_with_cache == losses, f"{way}: a cache must not change what is trained"
        print(f"{way:>20}: {ratio:.2%}, losses equal to those without a cache")
