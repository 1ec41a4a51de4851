# SPDX-License-Identifier: Apache-2.0
"""Reads the features of a graph's nodes from a file, through a cache that knows the next batches.

A batch of a graph network needs the features of its nodes and of sampled neighbours. Popular nodes
occur in most batches, so a cache of a part of them saves most reads, and which ones to keep follows
from the next batches (the idea of Ginex, VLDB 2022). The workers sample the neighbours; the
trainer looks ahead at the nodes of batches that are ready.
"""

from __future__ import annotations

import tempfile

import numpy as np
import torch
from torch.utils.data import Dataset

from penstock import BeladyCache, DataLoader

NODES, WIDTH, FANOUT, BATCH, EPOCH = 3000, 32, 8, 16, 1600
CACHED_NODES = 400
WINDOW = 32  # batches that are known ahead


class Neighbourhoods(Dataset):
    """A node and neighbours of it, sampled by the index alone: popular nodes have more edges."""

    def __init__(self):
        popularity = torch.arange(1, NODES + 1, dtype=torch.float64) ** -1.1
        self.weights = popularity[torch.randperm(NODES, generator=seeded(1))]

    def __len__(self):
        return EPOCH

    def __getitem__(self, index):
        neighbours = torch.multinomial(self.weights, FANOUT, generator=seeded(2 + index))
        return torch.cat([torch.tensor([index * 7 % NODES]), neighbours])


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def make_loader():
    return DataLoader(
        Neighbourhoods(), BATCH, num_workers=2, prefetch_factor=WINDOW // 2, collate_fn=nodes_of
    )


def nodes_of(samples):
    return torch.stack(samples).unique()


def read_epoch(path, window):
    """Read the features of each batch. Return the cache, and a sum that checks them."""
    file = np.memmap(path, np.float32, "r", shape=(NODES, WIDTH))
    cache, held = BeladyCache(CACHED_NODES), torch.empty(CACHED_NODES, WIDTH)
    total = 0.0
    loader = make_loader()
    for nodes in loader:
        step = cache.read(nodes, loader.lookahead(window, lambda nodes: nodes) if window else ())
        features, is_held = torch.empty(len(nodes), WIDTH), step.slots >= 0
        features[is_held] = held[step.slots[is_held]]
        features[~is_held] = torch.from_numpy(file[nodes[~is_held].numpy()])
        held[step.kept_slots[step.kept_slots >= 0]] = features[step.kept_slots >= 0]
        total += features.double().sum().item()
    return cache, total


def misses_of_offline_rule(batches):
    """Belady's rule with the whole epoch before it."""
    cache = BeladyCache(CACHED_NODES)
    for number, nodes in enumerate(batches):
        cache.read(nodes, batches[number + 1 :])
    return cache.misses


if __name__ == "__main__":
    with tempfile.NamedTemporaryFile() as file:
        torch.rand(NODES, WIDTH, generator=seeded(0)).numpy().tofile(file)
        file.flush()
        sums = []
        for name, window in (("none", 0), (f"the next {WINDOW} batches", WINDOW)):
            cache, total = read_epoch(file.name, window)
            sums.append(total)
            print(f"{name:>20}: {cache.misses} reads of {cache.hits + cache.misses}")
        assert sums[0] == sums[1], "the cache changed the features"
        print(f"{'an oracle':>20}: {misses_of_offline_rule(list(make_loader()))} reads")
