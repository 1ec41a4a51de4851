# SPDX-License-Identifier: Apache-2.0
"""Constants that workers have copies of, and whether they still are what they were."""

from __future__ import annotations

import torch

from penstock.graph.constants import ConstantWatch, is_same_bits


def test_a_write_is_a_change_and_the_same_bits_again_are_none() -> None:
    tensor = torch.tensor([1.0, float("nan")])
    watch = ConstantWatch({2: tensor})
    inputs = [None, None, tensor]
    assert watch.changed(inputs) == []
    tensor.copy_(tensor.clone())  # as DistributedDataParallel's broadcast does
    assert watch.changed(inputs) == []
    tensor[0] = 2.0
    assert watch.changed(inputs) == [2]


def test_another_tensor_in_its_place_counts_by_content() -> None:
    tensor = torch.arange(4.0)
    watch = ConstantWatch({0: tensor})
    assert watch.changed([tensor.clone()]) == []
    assert watch.changed([tensor + 1]) == [0]
    assert watch.changed([tensor.double()]) == [0]
    assert watch.changed([torch.arange(4.0).expand(2, 4)]) == [0]


def test_memory_given_to_a_new_tensor_is_not_taken_for_the_old_one() -> None:
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
