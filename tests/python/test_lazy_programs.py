# SPDX-License-Identifier: Apache-2.0
"""Random programs on a batch of lazy tensors: every tensor they hold in the end equals the one
computed from plain tensors, for any views, writes or reads on the way."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.tracking.batch_origin import BatchHandle, Provenance, ProvenanceTable
from penstock.tracking.deferral import Deferral
from penstock.tracking.lazy_tensor import LazyTensor

MEAN = torch.tensor([0.25, -0.5, 2.0])
STEPS = 12
BATCHES = 4

Pool = list[torch.Tensor]
Step = Callable[[Pool], None]


def _chosen(pool: Pool, rng: random.Random) -> int:
    return rng.randrange(len(pool))


def _pure(rng: random.Random, count: int) -> Step:
    """An operation that makes a tensor."""
    index, other = rng.randrange(count), rng.randrange(count)
    number = rng.choice([2, 0.5, -1.5, 255])
    makers: list[Callable[[Pool], torch.Tensor]] = [
        lambda pool: pool[index].float(),
        lambda pool: pool[index] / number,
        lambda pool: pool[index] * number,
        lambda pool: pool[index] - MEAN,
        lambda pool: pool[index].double().sin(),
        lambda pool: pool[index][1:],
        lambda pool: pool[index][..., 0],
        lambda pool: pool[index].transpose(0, -1),
        lambda pool: pool[index].reshape(-1),
        lambda pool: pool[index].contiguous(),
        lambda pool: pool[index].clone(),
        lambda pool: pool[index].detach(),
        lambda pool: pool[index].to("cpu"),
        lambda pool: pool[index].chunk(2)[0],
        lambda pool: pool[index].sum(-1, keepdim=True).to(torch.float32),
        lambda pool: pool[index] + pool[other],
        lambda pool: torch.cat([pool[index].float().flatten(), pool[other].float().flatten()]),
        lambda pool: pool[index].cumsum(0),
        lambda pool: pool[index][torch.tensor([0])],
        lambda pool: pool[index] > 1,
        lambda pool: torch.where(pool[index] > 0, pool[index], number),
        lambda pool: pool[index].flip(0).unsqueeze(0).squeeze(0),
        lambda pool: pool[index].data,
    ]
    return _appending(rng.choice(makers))


def _appending(make: Callable[[Pool], torch.Tensor]) -> Step:
    return lambda pool: pool.append(make(pool))


def _write(rng: random.Random, count: int) -> Step:
    index, other = rng.randrange(count), rng.randrange(count)
    number = rng.choice([2, 0.5, 3])

    def fill_by_numpy(pool: Pool) -> None:
        array = pool[index].numpy()
        if array.size:
            array.reshape(-1)[:1] = 3
            array[...] = array + 1

    def put(pool: Pool) -> None:
        pool[index][:1] = number

    def put_other(pool: Pool) -> None:
        pool[index][:1] = pool[other].flatten()[0]

    writers: list[Callable[[Pool], Any]] = [
        lambda pool: pool[index].add_(number),
        lambda pool: pool[index].mul_(number),
        lambda pool: pool[index].div_(255),
        lambda pool: pool[index].sub_(pool[other]),
        lambda pool: pool[index].clamp_(-1, 1),
        lambda pool: pool[index].t_() if pool[index].dim() == 2 else None,
        lambda pool: pool[index].unsqueeze_(0),
        lambda pool: pool[index].zero_(),
        lambda pool: pool[index].data.add_(1),
        lambda pool: torch.add(pool[index], number, out=pool[index]),
        put,
        put_other,
        fill_by_numpy,
    ]
    return rng.choice(writers)


def _read(rng: random.Random, count: int) -> Step:
    index = rng.randrange(count)
    readers: list[Callable[[Pool], Any]] = [
        lambda pool: repr(pool[index]),
        lambda pool: pool[index].tolist(),
        lambda pool: float(pool[index].float().sum()),
        lambda pool: pool[index].numpy().copy(),
        lambda pool: bool((pool[index] > 0).any()),
        lambda pool: list(pool[index]),
    ]
    return rng.choice(readers)


def _program(seed: int) -> list[Step]:
    rng = random.Random(seed)
    steps: list[Step] = []
    count = 2
    for _ in range(STEPS):
        kind = rng.choices([_pure, _write, _read], [6, 2, 1])[0]
        steps.append(kind(rng, count))
        count += kind is _pure
    return steps


def _leaves(batch: int) -> Pool:
    generator = torch.Generator().manual_seed(batch)
    return [
        torch.randint(0, 255, (4, 3), dtype=torch.uint8, generator=generator),
        torch.randn(4, 2, 3, generator=generator),
    ]


def _run(steps: list[Step], pool: Pool) -> list[str]:
    """Errors on the way: the same in both worlds."""
    errors = []
    for step in steps:
        size = len(pool)
        try:
            step(pool)
        except (RuntimeError, IndexError, TypeError) as error:
            errors.append(type(error).__name__)
            if len(pool) == size:
                pool.append(torch.zeros(2, 3))
    return errors


def _seen(pool: Pool, order: list[int]) -> list[Any]:
    shown: list[Any] = [None] * len(pool)
    for index in order:
        tensor = pool[index]
        shown[index] = (
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.contiguous().numpy().tobytes(),
        )
    return shown


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_random_programs_on_lazy_tensors_match_plain_ones(first: int) -> None:
    lazies = waited = 0
    for seed in range(first, first + 100):
        steps = _program(seed)
        table = ProvenanceTable()
        deferral = Deferral(table)
        for batch in range(BATCHES):
            plain_pool = _leaves(batch)
            plain_errors = _run(steps, plain_pool)
            leaves = _leaves(batch)
            handle = BatchHandle(len(leaves), {}, 0, batch)
            for index, leaf in enumerate(leaves):
                table.record(leaf, Provenance(handle, index, leaf._version))
            followed = deferral.follow(handle, leaves)
            pool: Pool = [followed[id(leaf)] for leaf in leaves]
            errors = _run(steps, pool)
            order = list(range(len(pool)))
            random.Random(seed).shuffle(order)
            lazies += sum(type(tensor) is LazyTensor for tensor in pool)
            waited += sum(value.tensor is None for value in handle.lazy_values)
            assert errors == plain_errors, f"seed {seed}, batch {batch}"
            same = _seen(pool, order) == _seen(plain_pool, order)
            assert same, f"seed {seed}, batch {batch}"
    assert lazies > 1000 and waited > 20
