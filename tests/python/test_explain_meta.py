# SPDX-License-Identifier: Apache-2.0
"""`explain` plans models without values, whose tensors are on the meta device, as it plans them
with values, and `offload` names what such a model lacks."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from bench_runs import BENCH, output_of_bench
from offload_training import TwoGraphs
from torch import nn

import penstock
from penstock.graph.plan import Plan

ROWS = torch.linspace(-1, 1, 60).view(3, 20)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The bench's decoder of patches and tokens."""
    monkeypatch.syspath_prepend(str(BENCH))
    return pytest.importorskip("explain_large")


class Scaled(nn.Module):
    """Constants of three kinds in front of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(20, 2)
        self.register_buffer("mean", torch.full((20,), 0.5))
        self.scales = [torch.ones(20)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net((x * 2.0 - self.mean) * self.scales[0])


class ReadsNumber(TwoGraphs):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.net(x * 2.0)
        return y * 2.0 if y.sum() > 0 else y


class FollowsBatch(TwoGraphs):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2.0
        return self.net(x + 1.0 if x.sum() > -1e9 else x.sin())


def on_meta(make: Callable[..., nn.Module], *arguments: Any) -> nn.Module:
    with torch.device("meta"):
        return make(*arguments)


def maximal(model: Any, batch: Any = ROWS, **options: Any) -> Plan:
    return penstock.explain(model, batch, cut="maximal", **options)


def facts(plan: Plan) -> Any:
    """All of a plan but its times."""
    assert plan.refused is None, plan.refused
    calls = [
        (call.index, call.operator, call.place, call.reason, call.made_bytes, call.device)
        for call in (*plan.moved, *plan.kept)
    ]
    return calls, plan.edges, plan.raw_bytes, plan.maximal_bytes, plan.boundary_bytes


def reasons(plan: Plan) -> dict[str, str]:
    assert plan.refused is None, plan.refused
    return {call.operator.partition(" at ")[0]: call.reason for call in plan.kept}


def moved(plan: Plan) -> list[str]:
    assert plan.refused is None, plan.refused
    return [call.operator.partition(" at ")[0] for call in plan.moved]


@pytest.mark.slow
def test_plan_of_130_million_parameters_is_that_of_the_model_with_values(
    large: ModuleType,
) -> None:
    real, absent = large.decoder(8, 1024, "cpu"), large.decoder(8, 1024, "meta")
    assert sum(parameter.numel() for parameter in real.parameters()) > 130e6
    assert real.head.weight.device.type == "cpu" and absent.head.weight.is_meta
    plan = maximal(absent, large.images_and_text())
    assert facts(plan) == facts(maximal(real, large.images_and_text()))
    assert moved(plan) == ["float", "truediv", "sub", "truediv", "unfold", "transpose", "to"]


@pytest.mark.slow
def test_models_of_billions_of_parameters_take_no_memory_for_them() -> None:
    """At this width a block has a billion parameters, 2 GiB."""
    out = output_of_bench("explain_large.py", "--sizes", "4x9216", "--rounds", "1")
    records = {r["name"].partition("/")[2]: r for r in map(json.loads, _json_lines(out))}
    assert records["peak_bytes"]["parameters"]["parameters"] > 4e9
    assert records["peak_bytes"]["parameters"]["moved"] == 7
    assert records["peak_bytes"]["median"] < 2**30
    grown = records["peak_bytes"]["median"] - records["import_bytes"]["median"]
    assert grown < 400 * 2**20


def _json_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("{")]


def test_small_plan_is_that_of_the_model_with_values(large: ModuleType) -> None:
    plans = [
        maximal(large.decoder(1, 256, device), large.images_and_text())
        for device in ("meta", "cpu")
    ]
    assert facts(plans[0]) == facts(plans[1])


def test_explaining_leaves_a_model_on_meta_as_it_was(
    large: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    model = large.decoder(1, 256, "meta")
    tensors = model.state_dict(keep_vars=True)
    versions = [tensor._version for tensor in tensors.values()]
    attributes = {name: dict(part.__dict__) for name, part in model.named_modules()}
    penstock.explain(model, large.images_and_text())
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(tensors) and all(after[key] is tensors[key] for key in tensors)
    assert [tensor._version for tensor in after.values()] == versions
    assert {name: dict(part.__dict__) for name, part in model.named_modules()} == attributes
    assert model.head.weight is model.tokens.weight and model.head.weight.is_meta
    assert model.mean.tolist() == large.decoder(1, 256, "meta").mean.tolist()
    assert capfd.readouterr().err == ""


def test_calls_that_read_constants_without_values_stay_for_that_reason() -> None:
    model = on_meta(Scaled)
    plan = maximal(model)
    assert moved(plan) == ["mul"]
    because = "which is on the meta device; it could move once that has values"
    found = reasons(plan)
    assert found["sub"] == f"it reads mean, {because}"
    assert found["mul"] == f"it reads L['self'].scales[0], {because}"
    assert found["linear"] in (
        "it reads net.weight, which training changes", "it reads net.bias, which training changes",
    )  # fmt: skip
    model.mean = torch.full((20,), 0.5)
    assert moved(maximal(model)) == ["mul", "sub"]
    model.scales = [torch.ones(20)]
    assert facts(maximal(model)) == facts(maximal(Scaled()))


def test_models_that_have_some_of_their_values_are_planned() -> None:
    model = Scaled()
    model.net = on_meta(nn.Linear, 20, 2)  # type: ignore[assignment]
    assert facts(maximal(model)) == facts(maximal(Scaled()))
    buffer = Scaled()
    buffer.mean = buffer.mean.to("meta")
    assert moved(maximal(buffer)) == ["mul"]
    assert "it reads mean, which is on the meta device" in reasons(maximal(buffer))["sub"]


@pytest.mark.parametrize("is_training", [True, False])
def test_buffers_that_training_writes_are_state_without_values_too(is_training: bool) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.BatchNorm1d(20, affine=False), nn.Linear(20, 2))
        return model.train(is_training)

    plan, real = maximal(on_meta(make)), maximal(make())
    if is_training:
        assert facts(plan) == facts(real)
    assert ("meta device" in reasons(plan)["batch_norm"]) == (not is_training)


@pytest.mark.parametrize("kind", [TwoGraphs, FollowsBatch])
def test_several_graphs_are_planned_by_the_values_of_the_batch(
    kind: type[nn.Module], capfd: pytest.CaptureFixture[str]
) -> None:
    plan = maximal(on_meta(kind))
    assert facts(plan) == facts(maximal(kind()))
    assert "mul" in moved(plan)
    assert "FakeTensor" not in capfd.readouterr().err


def test_graph_modules_and_exported_programs_without_values_are_planned() -> None:
    model = on_meta(Scaled)
    assert moved(maximal(torch.fx.symbolic_trace(model))) == ["mul"]
    exported = torch.export.export(model, (ROWS.to("meta"),))
    assert moved(maximal(exported)) == ["mul"]
    assert "it reads mean, which is on the meta device" in reasons(maximal(exported))["sub"]


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torchscript_without_values_is_planned() -> None:
    traced = torch.jit.trace(Scaled(), ROWS).to("meta")
    plan = maximal(traced)
    assert [call.operator.partition(" at ")[0] for call in plan.moved] == ["aten::mul"]
    assert "self.mean" in reasons(plan)["aten::sub"]


def test_a_call_of_the_users_is_planned() -> None:
    def call(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["rows"] + 1.0).sum()

    plan = maximal(on_meta(Scaled), {"rows": ROWS}, call=call)
    assert moved(plan) == ["add", "mul"]


def test_dtype_and_layout_of_parameters_are_kept() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 20, dtype=torch.bfloat16).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(self.weight.dtype) @ self.weight).view(2, 3)

    assert facts(maximal(on_meta(Transposed))) == facts(maximal(Transposed()))


def test_batches_without_values_are_rejected() -> None:
    plan = maximal(on_meta(Scaled), ROWS.to("meta"))
    assert plan.refused is not None
    assert plan.refused.startswith(
        "the tensors of the batch must be on the CPU, got one on the meta device (float32 [3, 20])"
    )
    with torch.device("meta"):
        plan = maximal(Scaled(), ROWS)
    assert plan.refused is not None
    assert plan.refused.startswith("the default device must be a real one, got meta")


def test_function_that_calls_a_model_without_values_is_rejected() -> None:
    model = on_meta(Scaled)
    plan = maximal(lambda batch: model(batch))
    assert plan.refused is not None
    assert plan.refused == (
        "the Scaled that the function calls must have values, got scales on the meta device; pass "
        "the model itself, and the function as call=lambda model, batch: ..."
    )


def test_forward_that_reads_a_number_without_a_value_is_rejected() -> None:
    plan = maximal(on_meta(ReadsNumber))
    assert plan.refused is not None
    assert "that depends on values on the meta device; call model.to_empty" in plan.refused


def test_tensor_subclass_without_values_is_rejected() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    model = on_meta(nn.Linear, 20, 2)
    half = torch.empty(2, 20, device="meta")
    model.weight = nn.Parameter(TwoTensor(half, half))
    plan = maximal(model)
    assert plan.refused is not None
    assert "must be a plain tensor, got weight, a TwoTensor" in plan.refused


def test_model_that_cannot_be_copied_is_rejected() -> None:
    model = on_meta(Scaled)
    model.lock = threading.Lock()  # type: ignore[assignment]
    plan = maximal(model)
    assert plan.refused is not None
    assert "explained as a copy, and this one cannot be copied" in plan.refused
    assert moved(maximal(_with_lock(Scaled()))) == ["mul", "sub", "mul"]


def _with_lock(model: nn.Module) -> nn.Module:
    model.lock = threading.Lock()  # type: ignore[assignment]
    return model


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_hugging_face_models_without_values_are_planned(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        family,
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=100,
    )
    make = transformers.AutoModelForCausalLM.from_config
    ids = torch.arange(32).view(2, 16)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    plan, real = maximal(on_meta(make, config), batch), maximal(make(config), batch)
    assert _placed(plan, "worker") == _placed(real, "worker")
    assert len(plan.moved) >= 15
    # The rotary embedding's frequencies are a buffer, so calls that read it have no values.
    assert _placed(plan, "trainer") >= _placed(real, "trainer")
    late = [call.reason for call in plan.kept if "meta device" in call.reason]
    assert bool(late) == (family != "gpt2") and all("inv_freq" in reason for reason in late)


def _placed(plan: Plan, place: str) -> set[tuple[int, str]]:
    calls = (*plan.moved, *plan.kept)
    return {(call.index, call.operator) for call in calls if call.place == place}


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return ROWS[index % 3] + index


def test_offload_names_the_missing_values_and_begins_once_they_exist(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    model = on_meta(TwoGraphs)
    loader = penstock.DataLoader(Rows(), batch_size=3, num_workers=1)
    penstock.offload(model, loader, cut="maximal")
    with caplog.at_level(logging.WARNING, "penstock"):
        batches = iter(loader)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="meta"):
                model(next(batches))
    assert len(caplog.records) == 1
    assert (
        "all its parameters and buffers must have values, got net.weight on the meta device; call "
        "model.to_empty(device=...)"
    ) in caplog.records[0].getMessage()
    assert loader.plan is not None and "net.weight on the meta device" in str(loader.plan.refused)
    assert "WON'T CONVERT" not in capfd.readouterr().err
    model.to_empty(device="cpu")
    nn.init.ones_(model.net.weight)
    nn.init.zeros_(model.net.bias)
    expected = nn.functional.linear(ROWS[0] + 6 + torch.zeros(1), model.net.weight) * 2
    got = [model(batch) for batch in batches]
    assert len(got) == 2 and torch.allclose(got[0][0], expected)
    assert loader.plan is not None and loader.plan.refused is None
    assert moved(loader.plan) == ["mul"]


PROGRAM = """
import torch, penstock
from torch.utils.data import DataLoader, TensorDataset

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(20, 2)
    def forward(self, x):
        return self.net(x * 2.0 + 1.0)

if __name__ == "__main__":
    with torch.device("meta"):
        model = Model()
    for (x,) in DataLoader(TensorDataset(torch.ones(8, 20)), batch_size=4):
        model(x)
"""


@pytest.mark.slow
def test_program_whose_model_has_no_values_is_explained(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "penstock", "explain", "--format", "json", "train.py"]
    done = subprocess.run(
        [*command[:4], "--cut", "maximal", *command[4:]],
        cwd=tmp_path, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert [call["operator"].partition(" at ")[0] for call in plan["moved"]] == ["mul", "add"]
