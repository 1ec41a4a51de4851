# SPDX-License-Identifier: Apache-2.0
"""`explain` tells what `offload` would do, and touches nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cut_models import CASES, NormalizedResNet, WideAndDeep, images, rows, table
from test_offload import TwoGraphs, bits, fresh
from torch import nn

from penstock.explanation import default_arguments, explain
from penstock.plan import Plan, PlannedCall


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def names(calls: tuple[PlannedCall, ...]) -> list[str]:
    return [call.operator.partition(" at ")[0] for call in calls]


@pytest.mark.slow
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing_of_the_model_or_the_process_changes(case: Any, is_training: bool) -> None:
    model = fresh(case.make_model).train(is_training)
    fired: list[int] = []
    model.register_forward_hook(lambda *_: fired.append(1))
    attributes = dict(model.__dict__)
    versions = [t._version for t in model.state_dict(keep_vars=True).values()]
    state = {key: bits(value) for key, value in model.state_dict().items()}
    random_state, batch = torch.get_rng_state(), case.make_batch(0)
    before = [bits(t) for t in torch.utils._pytree.tree_leaves(batch)]
    plan = explain(model, batch, call=call_of(case), cut="maximal")
    assert plan.refused is None and bool(plan.moved) == case.moves
    assert model.__dict__ == attributes and model.training == is_training and not fired
    assert [t._version for t in model.state_dict(keep_vars=True).values()] == versions
    assert {key: bits(value) for key, value in model.state_dict().items()} == state
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [bits(t) for t in torch.utils._pytree.tree_leaves(batch)] == before
    assert model._compiled_call_impl is None


def call_of(case: Any) -> Any:
    if case.name in ("wide_and_deep",):
        return lambda model, batch: model(batch["dense"], batch["category"], batch["user"])
    if case.name == "transformer":
        return lambda model, batch: model(
            batch["input_ids"], attention_mask=batch["attention_mask"]
        )
    return None


def test_the_plan_names_calls_places_reasons_and_bytes() -> None:
    inputs, _ = batch = images(0)
    plan = explain(fresh(NormalizedResNet), batch, cut="maximal")
    assert names(plan.moved) == ["float", "truediv", "sub", "truediv", "interpolate"]
    assert all(call.place == "worker" and call.worker_s > 0 for call in plan.moved)
    assert plan.moved[0].operator.startswith("float at cut_models.py:")
    stem = next(call for call in plan.kept if call.operator.startswith("conv2d"))
    assert stem.reason == "it reads stem.weight, which training changes"
    norm = next(call for call in plan.kept if call.operator.startswith("batch_norm"))
    assert norm.reason == "it reads norm1.running_mean, which training changes"
    # The labels are of the batch too, but the model never sees them.
    assert plan.raw_bytes == inputs.nbytes
    assert plan.boundary_bytes == plan.maximal_bytes == 6 * 3 * 16 * 16 * 4
    assert plan.worker_s > 0
    text = str(plan)
    assert "interpolate at cut_models.py" in text and f"{plan.boundary_bytes:,}" in text
    width = {line.index("worker") for line in text.splitlines()[2:7]}
    assert len(width) == 1  # the column is aligned
    read_back = json.loads(plan.to_json())
    assert read_back["moved"][0]["operator"] == plan.moved[0].operator
    assert read_back["refused"] is None and read_back["raw_bytes"] == plan.raw_bytes


def test_cut_none_keeps_all_and_a_bad_mode_is_an_error() -> None:
    plan = explain(fresh(NormalizedResNet), images(0), cut="none")
    assert not plan.moved and plan.refused is None and "interpolate" in names(plan.kept)
    with pytest.raises(ValueError, match="cut is 'all' but a mode was expected"):
        explain(fresh(NormalizedResNet), images(0), cut="all")  # type: ignore[arg-type]


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(20, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x * 2.0 + torch.randn_like(x))


def test_random_calls_move_only_when_they_may() -> None:
    batch = rows(0)
    plan = explain(Noisy(), batch, cut="maximal")
    assert names(plan.moved) == ["mul"] and "randn_like" in names(plan.kept)
    plan = explain(Noisy(), batch, cut="maximal", allow_random=True)
    assert names(plan.moved) == ["mul", "randn_like", "add"]


def test_a_model_that_is_not_one_graph_is_refused_with_the_reason() -> None:
    plan = explain(TwoGraphs(), rows(0))
    assert plan.refused is not None and "not one whole graph" in plan.refused
    assert str(plan).startswith("nothing moves: ")


def test_under_autocast_the_casts_are_a_part_of_what_moves() -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mix", torch.randn(20, 20))
            self.net = nn.Linear(20, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x @ self.mix)

    full = explain(Mixes(), rows(0), cut="maximal")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = explain(Mixes(), rows(0), cut="maximal")
    assert names(full.moved) == names(half.moved) == ["matmul"]
    assert half.boundary_bytes == full.boundary_bytes - 10 * 20 * 2


@pytest.mark.slow
def test_compiled_and_exported_models_are_looked_through() -> None:
    net, batch = fresh(NormalizedResNet).eval(), images(0)
    assert "interpolate" in names(explain(torch.compile(net), batch, cut="maximal").moved)
    exported = torch.export.export(net, (batch[0],))
    plan = explain(exported, batch[0], cut="maximal")
    assert plan.refused is None and plan.moved


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_torchscript_module_is_read_without_dynamo() -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(20, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(torch.log1p(x.abs()) * 0.5)

    plan = explain(torch.jit.script(Scripted()), rows(0)[0], cut="maximal")
    assert plan.refused is None and len(plan.moved) >= 2 and plan.kept


class TakesBatch(nn.Module):
    def forward(self, batch: Any) -> Any:
        return batch


class TakesTwo(nn.Module):
    def forward(self, a: Any, b: Any, c: Any = None) -> Any:
        return a, b, c


class TakesOne(nn.Module):
    def forward(self, x: Any, mask: Any = None) -> Any:
        return x, mask


def test_how_a_batch_becomes_arguments() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    assert default_arguments(TakesOne(), x) == ((x,), {})
    assert default_arguments(TakesOne(), [x, y]) == ((x,), {})
    assert default_arguments(TakesTwo(), (x, y, x)) == ((x, y), {})
    assert default_arguments(TakesBatch(), (x, y)) == (((x, y),), {})
    assert default_arguments(TakesOne(), {"x": x, "mask": y}) == ((), {"x": x, "mask": y})
    assert default_arguments(TakesOne(), {"x": x, "label": y}) == (({"x": x, "label": y},), {})
    assert default_arguments(TakesBatch(), {"x": x}) == (({"x": x},), {})


@pytest.mark.slow
def test_the_plan_of_explain_is_the_plan_of_a_loader_that_passes_all_it_has() -> None:
    batch = {key: value for key, value in table(0).items() if key != "label"}
    plan = explain(fresh(WideAndDeep), batch, cut="maximal")
    assert {"log1p", "clamp", "bucketize", "one_hot", "cat"} <= set(names(plan.moved))
    assert {"embedding"} <= set(names(plan.kept))
    assert isinstance(plan, Plan)
