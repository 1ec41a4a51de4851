# SPDX-License-Identifier: Apache-2.0
"""Models that were compiled before they are offloaded train bit-for-bit as they do compiled."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cut_models import CASES, Case
from in_process_pool import InProcessPool
from offload_training import TwoGraphs, batches_of, bits, fresh, train, warnings_of
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from penstock.cut.offloading import detach, offload

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_one_thread", "raised_recompile_limit")]


@pytest.fixture
def raised_recompile_limit() -> Iterator[None]:
    """For the copies that are not offloaded: Dynamo leaves the ninth of a class to Python."""
    with torch._dynamo.config.patch(recompile_limit=256):
        yield


CASE_OF = {case.name: case for case in CASES}


class Rows(nn.Module):
    """Features of rows, then a network with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net((x * 2.0 - 1.0).clamp(-3.0, 3.0))


def wrapped(make_model: Callable[[], nn.Module], **options: Any) -> nn.Module:
    return torch.compile(fresh(make_model), **options)


def in_place(make_model: Callable[[], nn.Module], **options: Any) -> nn.Module:
    model = fresh(make_model)
    model.compile(**options)
    return model


def train_compiled_and_cut(
    case: Case, compiled: Callable[..., nn.Module], **options: Any
) -> tuple[list[bytes], list[bytes], InProcessPool]:
    expected = train(compiled(case.make_model, **options), batches_of(case), case.loss)
    pool = InProcessPool(batches_of(case))
    model = offload(compiled(case.make_model, **options), pool, cut="maximal", verify_every=2)
    return train(model, pool, case.loss), expected, pool


@pytest.mark.sampled(3)
@pytest.mark.parametrize("compiled", [wrapped, in_place])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["wide_and_deep", "dropout_on_input", "side_branch"])
def test_cut_compiled_model_matches_compiled_training(
    name: str, backend: str, compiled: Callable[..., nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    trained, expected, pool = train_compiled_and_cut(CASE_OF[name], compiled, backend=backend)
    assert trained == expected
    assert pool.plan is not None and pool.plan.moved and pool.shipped_count
    assert not warnings_of(caplog)


@pytest.mark.long
@pytest.mark.parametrize("name", ["dropout_on_input", "log_mel"])
def test_cut_inductor_model_matches_inductor_training(name: str) -> None:
    """The comparison decides whether the cut is used: with another fusion, kernels may round
    differently."""
    trained, expected, pool = train_compiled_and_cut(CASE_OF[name], wrapped)
    assert trained == expected
    assert pool.plan is not None and pool.shipped_count


def rows_of(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, 20, generator=torch.Generator().manual_seed(seed))


def trained_on(model: nn.Module, pool: InProcessPool, sizes: list[int]) -> list[bytes]:
    trace: list[bytes] = []
    for seed, size in enumerate(sizes):
        torch.manual_seed(seed)
        loss = model(pool.deliver(rows_of(size, seed))).square().mean()
        loss.backward()
        trace += [bits(loss), *(bits(p.grad) for p in model.parameters() if p.grad is not None)]
    return trace


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_compiled_model_is_cut_for_other_batch_sizes(dynamic: bool | None) -> None:
    sizes = [10, 10, 6, 7, 7, 10, 3, 3]
    expected = trained_on(
        wrapped(Rows, backend="aot_eager", dynamic=dynamic), InProcessPool([]), sizes
    )
    pool = InProcessPool([])
    model = offload(wrapped(Rows, backend="aot_eager", dynamic=dynamic), pool, cut="maximal")
    assert trained_on(model, pool, sizes) == expected
    assert pool.plan is not None and pool.plan.moved and pool.shipped_count >= 4


def test_user_backend_compiles_suffix_and_whole_graph() -> None:
    seen: list[int] = []

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        seen.append(sum(node.op in ("call_function", "call_method") for node in graph.graph.nodes))
        return graph.forward

    pool = InProcessPool([])
    model = offload(torch.compile(fresh(Rows), backend=backend), pool, cut="maximal")
    for seed in range(3):
        model(pool.deliver(rows_of(10, seed)))
    assert len(seen) == 2 and seen[1] == seen[0] - 3


def test_fullgraph_break_still_raises_unsupported() -> None:
    model = offload(torch.compile(TwoGraphs(), backend="eager", fullgraph=True), InProcessPool([]))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model(torch.zeros(2, 20))


def test_several_graphs_of_a_compiled_model_are_each_cut() -> None:
    case = Case("", TwoGraphs, CASE_OF["dropout_on_input"].make_batch, CASES[5].loss, True)
    trained, expected, pool = train_compiled_and_cut(case, wrapped, backend="aot_eager")
    assert trained == expected and pool.plan is not None and pool.plan.moved


@pytest.mark.parametrize("compiled", [wrapped, in_place])
def test_compiled_model_keeps_interface_and_detach_restores_it(
    compiled: Callable[..., nn.Module],
) -> None:
    model = compiled(Rows, backend="eager")
    names, before = list(model.state_dict()), dict(model.__dict__)
    pool = InProcessPool([])
    assert offload(model, pool, cut="maximal") is model
    for seed in range(3):
        model(pool.deliver(rows_of(4, seed)))
    assert list(model.state_dict()) == names
    twin = copy.deepcopy(model)
    assert type(twin) is type(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    model.eval()
    assert not model.net.training if isinstance(model, Rows) else not model._orig_mod.training
    batch = rows_of(4, 9)
    assert bits(model(pool.deliver(batch))) == bits(twin.eval()(batch))
    assert detach(model) is model
    for name in ("forward", "_compiled_call_impl"):
        assert model.__dict__.get(name) is before.get(name)


def test_hooks_of_compiled_model_fire() -> None:
    calls: list[str] = []
    model = wrapped(Rows, backend="eager")
    assert isinstance(model, OptimizedModule)
    model._orig_mod.register_forward_hook(lambda *_: calls.append("inner"))
    model.register_forward_pre_hook(lambda *_: calls.append("outer"))
    pool = InProcessPool([])
    offload(model, pool, cut="maximal")
    for seed in range(3):
        model(pool.deliver(rows_of(4, seed)))
    assert calls.count("inner") == calls.count("outer") == 3


def test_cut_compiled_training_step_matches_uncut() -> None:
    def step_of(net: nn.Module) -> Any:
        def step(batch: torch.Tensor) -> torch.Tensor:
            return net(batch.double().float() / 3.0).square().mean()

        return torch.compile(step, backend="aot_eager")

    def run(net: nn.Module, step: Any, pool: InProcessPool) -> list[bytes]:
        trace = []
        for seed in range(5):
            loss = step(pool.deliver(rows_of(10, seed)))
            loss.backward()
            trace += [bits(loss), *(bits(p.grad) for p in net.parameters() if p.grad is not None)]
        return trace

    net = nn.Linear(20, 2)
    twin, pool = copy.deepcopy(net), InProcessPool([])
    expected = run(net, step_of(net), InProcessPool([]))
    compiled = step_of(twin)
    step = offload(compiled, pool, cut="maximal")
    assert run(twin, step, pool) == expected
    assert pool.plan is not None and pool.plan.moved and pool.shipped_count
    assert detach(step) is compiled


def halve_results(results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(result * 0.5 for result in results)


def halve_gradients(results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(result.detach() + (result - result.detach()) * 0.5 for result in results)


@pytest.mark.parametrize(
    ("change", "kind"), [(halve_results, "results"), (halve_gradients, "gradients")]
)
def test_whole_graph_is_used_if_backend_compiles_suffix_differently(
    change: Callable[..., Any], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def change_large_graphs(graph: torch.fx.GraphModule, examples: Any) -> Any:
        calls = sum(node.op in ("call_function", "call_method") for node in graph.graph.nodes)
        if calls < 6:
            return graph.forward
        return lambda *inputs: change(graph.forward(*inputs))

    pair = [torch.compile(fresh(Rows), backend=change_large_graphs) for _ in range(2)]
    pool = InProcessPool([])
    offload(pair[1], pool, cut="maximal")
    for seed in range(4):
        batch = rows_of(10, seed)
        found = []
        for model, given in zip(pair, (batch, pool.deliver(batch)), strict=True):
            torch.manual_seed(seed)
            result = model(given)
            result.sum().backward()
            found.append([bits(result), *(bits(p.grad) for p in model.parameters())])
        assert found[0] == found[1]
    assert pool.shipped_count
    assert any(f"has different {kind}" in message for message in warnings_of(caplog))


@torch.library.custom_op("penstock_tests::noted", mutates_args=())
def noted(x: torch.Tensor) -> torch.Tensor:
    NOTES.append(1)
    return x.clone()


NOTES: list[int] = []


def test_custom_op_that_may_have_side_effects_runs_once_per_call() -> None:
    class Notes(Rows):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x = noted(x * 2.0)
            return self.net(x)

    NOTES.clear()
    noted.register_fake(lambda x: torch.empty_like(x))
    pool = InProcessPool([])
    model = offload(torch.compile(fresh(Notes), backend="eager"), pool, cut="maximal")
    for seed in range(4):
        model(pool.deliver(rows_of(10, seed)))
    assert len(NOTES) == 4 and pool.plan is not None
    assert not pool.plan.moved and pool.plan.refused is not None
    assert pool.plan.refused.startswith("the compiled model calls noted at test_offload_compiled")
    assert "which may have side effects" in pool.plan.refused


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(20, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_preprocessing_before_compiled_model_moves(backend: str) -> None:
    """The user's compiler is given ordinary tensors, in place of the waiting ones."""

    def results(is_offloaded: bool) -> tuple[list[bytes], InProcessPool]:
        torch.manual_seed(4)
        model = torch.compile(Shifted(), backend=backend)
        pool = InProcessPool([])
        if is_offloaded:
            offload(model, pool, cut="maximal")
        found = []
        for seed in range(12):
            batch = pool.deliver(rows_of(4, seed)) if is_offloaded else rows_of(4, seed)
            found.append(bits(model(batch.double().mul(0.5).float())))
        return found, pool

    expected, _ = results(False)
    ours, pool = results(True)
    assert ours == expected
    assert pool.plan is not None and pool.plan.moved
