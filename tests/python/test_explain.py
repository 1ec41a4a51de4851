# SPDX-License-Identifier: Apache-2.0
"""`explain` reports the effects of `offload`, without side effects."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
import subprocess
from typing import Any

import numpy as np
import pytest
import torch
from cut_models import (
    CASES,
    NormalizedResNet,
    SideBranch,
    TokenTransformer,
    WideAndDeep,
    images,
    mapping,
    rows,
    table,
    tokens,
)
from dot_grammar import parse_dot
from in_process_pool import InProcessPool
from offload_training import TwoGraphs, bits, fresh, generator_states
from torch import nn

from penstock.cut.offloading import offload
from penstock.explanation.explanation import default_arguments, explain
from penstock.graph.plan import Plan, PlannedCall, PlannedEdge
from penstock.graph.plan_text import COLUMNS, shorten


def names(calls: tuple[PlannedCall, ...]) -> list[str]:
    return [call.operator.partition(" at ")[0] for call in calls]


@pytest.mark.slow
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_explain_changes_neither_model_nor_process_state(case: Any, is_training: bool) -> None:
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


def test_plan_has_calls_places_reasons_and_bytes() -> None:
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
    text = plan.table()
    assert "interpolate at cut_models.py" in str(plan)
    assert "interpolate at cut_models.py" in text and f"{plan.boundary_bytes:,}" in text
    width = {line.index("worker") for line in text[text.index("operator ") :].splitlines()[2:7]}
    assert len(width) == 1  # the column is aligned
    read_back = json.loads(plan.to_json())
    assert read_back["moved"][0]["operator"] == plan.moved[0].operator
    assert read_back["refused"] is None and read_back["raw_bytes"] == plan.raw_bytes


def test_made_bytes_count_only_new_memory() -> None:
    plan = explain(fresh(NormalizedResNet), images(0), cut="maximal")
    wide, small = 6 * 3 * 24 * 24 * 4, 6 * 3 * 16 * 16 * 4
    assert [call.made_bytes for call in plan.moved] == [wide, wide, wide, wide, small]
    # relu(..., inplace=True) passes on the output of batch_norm; the head's result leaves the
    # model.
    assert {call.operator.partition(" at ")[0]: call.made_bytes for call in plan.kept[:4]} == {
        "conv2d": 6 * 8 * 16 * 16 * 4,
        "add_": 0,
        "batch_norm": 6 * 8 * 16 * 16 * 4,
        "relu": 0,
    }
    assert plan.kept[-1].made_bytes == 6 * 4 * 4
    views = explain(fresh(SideBranch), mapping(0), cut="maximal")
    assert {c.made_bytes for c in views.moved if c.operator.startswith(("split", "chunk"))} == {0}


def test_expanded_tensors_make_no_bytes() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(20, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(torch.zeros(3, 1).expand(3, 20) + x[:3] * 2.0)

    plan = explain(Picks(), rows(0), cut="maximal")
    made = {
        call.operator.partition(" at ")[0]: call.made_bytes for call in (*plan.moved, *plan.kept)
    }
    assert (made["zeros"], made["expand"], made["mul"]) == (12, 0, 240)


def test_totals_compare_no_cut_maximal_cut_and_chosen_cut() -> None:
    for cut in ("auto", "none", "maximal"):
        plan = explain(fresh(NormalizedResNet), images(0), cut=cut)  # type: ignore[arg-type]
        none, maximal, chosen = plan.totals
        assert [item.cut for item in plan.totals] == ["none", "maximal", "chosen"]
        assert (none.worker_s, none.boundary_bytes) == (0.0, plan.raw_bytes)
        # By one measurement: the trainer saves the time that workers take over.
        assert maximal.trainer_s == 0.0 and 0.0 < maximal.worker_s < none.trainer_s
        assert maximal.boundary_bytes == plan.maximal_bytes
        assert (chosen.worker_s, chosen.trainer_s) == (plan.worker_s, plan.trainer_s)
        assert chosen.boundary_bytes == plan.boundary_bytes
        if cut != "auto":
            other = none if cut == "none" else maximal
            assert dataclasses.replace(other, cut="chosen") == chosen


def test_edges_connect_the_batch_through_the_calls_to_the_result() -> None:
    plan = explain(fresh(NormalizedResNet), images(0), cut="maximal")
    calls = {call.index: call.operator.partition(" at ")[0] for call in (*plan.moved, *plan.kept)}
    assert plan.edges[0] == PlannedEdge(None, plan.moved[0].index, images(0)[0].nbytes, 0)
    crossing = [e for e in plan.edges if e.source == plan.moved[-1].index]
    assert [(calls[e.target or 0], e.tensor_bytes) for e in crossing] == [
        ("conv2d", plan.boundary_bytes)
    ]
    assert [calls[e.source or 0] for e in plan.edges if e.target is None] == ["linear"]
    assert {e.target for e in plan.edges} - {None} == {
        index for index, operator in calls.items() if operator != "add_"
    }  # num_batches_tracked.add_ reads a buffer alone
    masked = explain(fresh(TokenTransformer), token_inputs(), cut="maximal")
    assert {edge.leaf for edge in masked.edges} == {None, 0, 1}
    known = {call.index for call in (*masked.moved, *masked.kept)} | {None}
    assert all({edge.source, edge.target} <= known for edge in masked.edges)


def test_json_has_every_field_of_the_plan() -> None:
    plan = explain(fresh(SideBranch), mapping(0), cut="maximal")
    fields = json.loads(plan.to_json())
    assert list(fields) == [
        "schema", "moved", "kept", "raw_bytes", "maximal_bytes", "boundary_bytes", "worker_s",
        "trainer_s", "refused", "totals", "edges", "link_bytes_per_s", "copy_bytes_per_s", "priced",
        "workers_apart", "sample",
    ]  # fmt: skip
    assert fields["moved"] == [dataclasses.asdict(call) for call in plan.moved]
    assert [PlannedEdge(**edge) for edge in fields["edges"]] == list(plan.edges)
    assert [item["cut"] for item in fields["totals"]] == ["none", "maximal", "chosen"]


def token_inputs() -> dict[str, torch.Tensor]:
    return {key: value for key, value in tokens(0).items() if key != "label"}


def check_dot(text: str) -> Any:
    if shutil.which("dot"):
        subprocess.run(["dot", "-Tsvg"], input=text, capture_output=True, text=True, check=True)
    return parse_dot(text)


def test_dot_shows_the_cut_as_two_clusters() -> None:
    plan = explain(fresh(TokenTransformer), token_inputs(), cut="maximal")
    graph = check_dot(plan.to_dot())
    places = {
        f"call {call.index}": {"worker": "cluster_worker", "trainer": "cluster_trainer"}.get(
            call.place
        )
        for call in (*plan.moved, *plan.kept)
    }
    assert {name: graph.cluster_of.get(name) for name in places} == places
    assert {"cluster_worker", "cluster_trainer", None} == set(places.values())
    assert set(graph.nodes) - set(places) == {"leaf 0", "leaf 1", "result"}
    assert len(graph.edges) == len(plan.edges)
    assert graph.labels["cluster_worker"] == f"workers, {plan.worker_s * 1e3:.3f} ms per batch"
    first = plan.moved[0]
    what, _, where = first.operator.partition(" at ")
    label = graph.nodes[f"call {first.index}"]["label"]
    assert label == f"{what}\n{where}\n{first.worker_s * 1e3:.3f} ms"
    crossing = [edge for edge in graph.edges if "style" in edge[2]]
    assert crossing and all(
        (places[source], places[target]) == ("cluster_worker", "cluster_trainer")
        for source, target, _ in crossing
    )


def test_dot_escapes_labels() -> None:
    odd = 'a "b" \\N {c} -> <d>; // at C:\\m.py:1'
    call = PlannedCall(3, odd, "worker", 'it says "no"\n', 1e-3, 0.0, 8)
    graph = check_dot(Plan(moved=(call,), edges=(PlannedEdge(None, 3, 8, 0),)).to_dot())
    what, _, where = odd.rpartition(" at ")
    assert graph.nodes["call 3"]["label"] == f"{what}\n{where}\n1.000 ms"
    assert graph.nodes["call 3"]["tooltip"] == 'it says "no"\n'
    assert graph.edges == [("leaf 0", "call 3", {"label": "8"})]
    refused = check_dot(Plan(refused='forward says "no"').to_dot())
    assert refused.nodes["refused"]["label"] == 'no call moves: forward says "no"'


def test_table_fits_a_terminal_and_groups_similar_reasons() -> None:
    layers = [nn.Conv2d(3, 3, 1) for _ in range(40)]
    plan = explain(nn.Sequential(*layers), images(0)[0].float())
    text = plan.table()
    assert all(len(line) <= COLUMNS for line in text.splitlines())
    assert "[1] each reads one of these, which training changes: 0.weight, " in text
    assert "and 34 more" in text
    assert len({call.reason for call in plan.kept}) == 40
    assert "everything that can move" in text and f"{plan.raw_bytes:,}" in text
    long = "clone, sub_, div_, mul_, add_, clamp_, mul_, add_, pow_ at transforms.py:60"
    assert len(shorten(long, 48)) == 48 and shorten(long, 48).endswith("… at transforms.py:60")
    assert len(shorten("x" * 300, 48)) == 48 and shorten("mul at m.py:1", 48) == "mul at m.py:1"
    refused = Plan(refused="word " * 60)
    assert str(refused) == refused.table()
    assert all(len(line) <= COLUMNS for line in str(refused).splitlines())


def test_bare_sequential_is_captured_whole() -> None:
    plan = explain(nn.Sequential(nn.Flatten(), nn.Linear(400, 2)), torch.zeros(8, 20, 20))
    assert [*names(plan.moved), *names(plan.kept)] == ["flatten", "linear"]
    assert plan.kept[-1].reason == "it reads 1.weight, which training changes"


def test_cut_none_keeps_all_calls_and_an_invalid_mode_raises() -> None:
    plan = explain(fresh(NormalizedResNet), images(0), cut="none")
    assert not plan.moved and plan.refused is None and "interpolate" in names(plan.kept)
    with pytest.raises(ValueError, match="cut must be .*, got 'all'$"):
        explain(fresh(NormalizedResNet), images(0), cut="all")  # type: ignore[arg-type]


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(20, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x * 2.0 + torch.randn_like(x))


def test_random_calls_move_only_if_allowed() -> None:
    batch = rows(0)
    plan = explain(Noisy(), batch, cut="maximal")
    assert names(plan.moved) == ["mul"] and "randn_like" in names(plan.kept)
    plan = explain(Noisy(), batch, cut="maximal", allow_random=True)
    assert names(plan.moved) == ["mul", "randn_like", "add"]


@pytest.mark.long
@pytest.mark.slow
def test_multi_graph_model_is_explained_as_it_is_cut() -> None:
    model = fresh(DrawsBetweenGraphs)
    before = {name: bits(value) for name, value in model.state_dict().items()}
    states = generator_states()
    batch = rows(0)
    plan = explain(model, batch, cut="maximal")
    assert plan.refused is None and len(names(plan.kept)) >= 3
    assert [name.partition(" ")[0] for name in names(plan.moved)].count("mul") == 2
    assert {name: bits(value) for name, value in model.state_dict().items()} == before
    assert generator_states() == states and model.call_count == 0
    pool = InProcessPool([batch])
    offloaded = offload(model, pool, cut="maximal")
    for delivered in pool:
        offloaded(delivered[0])
    assert pool.plan is not None and names(pool.plan.moved) == names(plan.moved)
    by_call = explain(fresh(DrawsBetweenGraphs), batch, call=lambda m, b: m(b[0]), cut="maximal")
    assert len(by_call.moved) == len(plan.moved)


def test_multi_graph_function_is_rejected_with_the_reason() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2.0
        torch._dynamo.graph_break()
        return y + 1.0

    plan = explain(step, rows(0)[0])
    assert plan.refused is not None and "not a single graph" in plan.refused


class DrawsBetweenGraphs(TwoGraphs):
    """Python runs, and draws, in the middle of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(20)
        self.call_count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2.0
        self.call_count += 1
        print(random.random(), np.random.rand(), torch.rand(1), end="\r")
        return self.net(self.norm(x * 3.0))


def test_autocast_casts_move_with_their_operators() -> None:
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


@pytest.mark.long
@pytest.mark.slow
def test_compiled_and_exported_models_are_explained() -> None:
    net, batch = fresh(NormalizedResNet).eval(), images(0)
    assert "interpolate" in names(explain(torch.compile(net), batch, cut="maximal").moved)
    exported = torch.export.export(net, (batch[0],))
    plan = explain(exported, batch[0], cut="maximal")
    assert plan.refused is None and plan.moved


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_module_is_explained() -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(20, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(torch.log1p(x.abs()) * 0.5)

    plan = explain(torch.jit.script(Scripted()), rows(0)[0], cut="maximal")
    assert plan.refused is None and len(plan.moved) >= 2 and plan.kept
    assert [call.made_bytes for call in plan.moved] == [rows(0)[0].nbytes] * 3
    assert plan.moved[0].operator.startswith("aten::abs at test_explain.py:")
    assert re.search(r"\(aten::linear at linear.py:\d+\) reads self.net.weight", plan.table())
    check_dot(plan.to_dot())


class TakesBatch(nn.Module):
    def forward(self, batch: Any) -> Any:
        return batch


class TakesTwo(nn.Module):
    def forward(self, a: Any, b: Any, c: Any = None) -> Any:
        return a, b, c


class TakesOne(nn.Module):
    def forward(self, x: Any, mask: Any = None) -> Any:
        return x, mask


def test_batch_is_mapped_to_forward_arguments() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    assert default_arguments(TakesOne(), x) == ((x,), {})
    assert default_arguments(TakesOne(), [x, y]) == ((x,), {})
    assert default_arguments(TakesTwo(), (x, y, x)) == ((x, y), {})
    assert default_arguments(TakesBatch(), (x, y)) == (((x, y),), {})
    assert default_arguments(TakesOne(), {"x": x, "mask": y}) == ((), {"x": x, "mask": y})
    assert default_arguments(TakesOne(), {"x": x, "label": y}) == (({"x": x, "label": y},), {})
    assert default_arguments(TakesBatch(), {"x": x}) == (({"x": x},), {})


@pytest.mark.slow
def test_dict_batch_plan_moves_features_and_keeps_embeddings() -> None:
    batch = {key: value for key, value in table(0).items() if key != "label"}
    plan = explain(fresh(WideAndDeep), batch, cut="maximal")
    assert {"log1p", "clamp", "bucketize", "one_hot", "cat"} <= set(names(plan.moved))
    assert {"embedding"} <= set(names(plan.kept))
    assert isinstance(plan, Plan)
