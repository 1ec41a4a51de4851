# SPDX-License-Identifier: Apache-2.0
"""Constants that workers have copies of, and whether they are still unchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from in_process_pool import InProcessPool
from offload_training import bits, fresh
from torch import nn

from penstock import offload
from penstock.graph.constants import COMPARED_BYTES_PER_CALL, ConstantWatch, is_same_bits


def test_only_writes_of_other_bits_are_changes() -> None:
    tensor = torch.tensor([1.0, float("nan")])
    watch = ConstantWatch({2: tensor})
    inputs = [None, None, tensor]
    assert watch.changed(inputs) == []
    tensor.copy_(tensor.clone())  # as DistributedDataParallel's broadcast does
    assert watch.changed(inputs) == []
    tensor[0] = 2.0
    assert watch.changed(inputs) == [2]


def test_replaced_tensor_is_compared_by_content() -> None:
    tensor = torch.arange(4.0)
    watch = ConstantWatch({0: tensor})
    assert watch.changed([tensor.clone()]) == []
    assert watch.changed([tensor + 1]) == [0]
    assert watch.changed([tensor.double()]) == [0]
    assert watch.changed([torch.arange(4.0).expand(2, 4)]) == [0]


def test_reused_memory_is_not_taken_for_the_old_tensor() -> None:
    holder = [torch.full((1000,), 1.0)]
    watch = ConstantWatch({0: holder[0]})
    for value in range(2, 8):
        holder[0] = torch.full((1000,), float(value))
        assert watch.changed(holder) == [0]


def test_bits_are_compared_not_values() -> None:
    nan = torch.tensor([float("nan")])
    assert is_same_bits(nan, nan.clone())
    assert not is_same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not is_same_bits(torch.zeros(2, 3), torch.zeros(3, 2).t())
    assert is_same_bits(torch.zeros(0), torch.zeros(0))
    assert is_same_bits(torch.tensor(True), torch.tensor(True))
    assert is_same_bits(torch.tensor([1 + 2j]), torch.tensor([1 + 2j]))


LARGE = 3 * COMPARED_BYTES_PER_CALL // 4 + 8  # float32 numbers: a little more than three turns


def large() -> tuple[ConstantWatch, list[torch.Tensor]]:
    tensors = [torch.zeros(LARGE), torch.zeros(LARGE)]
    watch = ConstantWatch(dict(enumerate(tensors)))
    assert watch.changed(tensors) == []
    return watch, tensors


@pytest.mark.parametrize("place", [0, LARGE // 2, LARGE - 1])
@pytest.mark.parametrize("index", [0, 1])
def test_unversioned_write_to_a_large_constant_is_found_in_few_calls(
    index: int, place: int
) -> None:
    watch, tensors = large()
    tensors[index].numpy()[place] = 1.0
    calls = next(call for call in range(20) if watch.changed(tensors) == [index])
    assert calls < 8  # both together are a little more than six turns


def test_unversioned_write_is_found_at_the_start_of_an_epoch() -> None:
    watch, tensors = large()
    tensors[1].data.copy_(torch.ones(LARGE))
    assert watch.changed(tensors, epoch=1) == [1]


def test_constant_smaller_than_a_turn_is_compared_in_each_call() -> None:
    tensor = torch.zeros(COMPARED_BYTES_PER_CALL // 8)
    watch = ConstantWatch({0: tensor})
    assert watch.changed([tensor]) == []
    tensor.numpy()[-1] = 1.0
    assert watch.changed([tensor]) == [0]


def test_write_to_a_replacing_tensor_is_found() -> None:
    first = torch.zeros(8)
    watch = ConstantWatch({0: first})
    second = first.clone()
    assert watch.changed([second]) == []
    second.numpy()[3] = 1.0
    assert watch.changed([second]) == [0]


class Centred(nn.Module):
    """Subtracts a buffer of 27 KiB, which the program writes to between epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6912))
        self.net = nn.Linear(6912, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(torch.log1p(x.abs()) - self.mean)


def by_data(mean: torch.Tensor, value: float) -> None:
    mean.data.copy_(torch.full((6912,), value))


def by_numpy(mean: torch.Tensor, value: float) -> None:
    mean.numpy()[:] = value


@pytest.mark.slow
@pytest.mark.parametrize("write", [by_data, by_numpy])
@pytest.mark.parametrize("step", [0, 3])
def test_training_follows_unversioned_writes_to_a_large_buffer(
    write: Callable[[torch.Tensor, float], None], step: int
) -> None:
    """From the write on to the end the losses were the losses of the buffer before."""
    batches = [torch.randn(4, 6912, generator=torch.Generator().manual_seed(k)) for k in range(6)]

    def losses(model: nn.Module, pool: InProcessPool) -> list[bytes]:
        made = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for epoch in range(2):
            pool.epoch = epoch
            for place, x in enumerate(pool):
                if epoch == 1 and place == step:
                    write(model.mean, 0.5)  # type: ignore[arg-type]
                optimizer.zero_grad()
                loss = model(x).square().sum()
                loss.backward()
                optimizer.step()
                made.append(bits(loss))
        return made

    expected = losses(fresh(Centred), InProcessPool(batches))
    pool = InProcessPool(batches)
    model = offload(fresh(Centred), pool, cut="maximal")
    assert losses(model, pool) == expected
    assert pool.shipped_count
