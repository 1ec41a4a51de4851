# SPDX-License-Identifier: Apache-2.0
"""Models that Dynamo captures as several graphs: each is cut, and results that depend on the batch
are tracked from one graph into the next."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cut_models import CASES, Case, rows
from in_process_pool import InProcessPool
from offload_training import TwoGraphs, batches_of, bits, eager_trace, fresh, train, warnings_of
from torch import nn

from penstock.cut.installed_prefixes import UNUSED_CALLS_MAX
from penstock.cut.offloading import detach, offload

pytestmark = [pytest.mark.usefixtures("on_one_thread"), pytest.mark.slow]


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(20, 2)
        generator = torch.Generator().manual_seed(3)
        self.register_buffer("mean", torch.randn(20, generator=generator))
        self.register_buffer("mix", torch.randn(20, 20, generator=generator))


class ThreeGraphsAndABranch(Buffered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x * 2.0 - self.mean).abs()
        torch._dynamo.graph_break()
        y = x.log1p()
        if y.max() > 1.9:
            y = y * 0.5 + x
        torch._dynamo.graph_break()
        return self.net(y.sin())


class ReadsAnItem(Buffered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x / x.abs().max().item()
        return self.net(x.cos() + self.mean.tanh())


class PassesAView(Buffered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1)
        torch._dynamo.graph_break()
        return self.net(flat.reshape(x.shape).cos() * self.mean)


class PassesTwoViewsOfOneValue(Buffered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2.0
        flat = y.view(-1)
        torch._dynamo.graph_break()
        flat[:7] = 1.0
        return self.net(y.cos())


class WritesAPassedResult(Buffered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2.0
        torch._dynamo.graph_break()
        y.add_(1.0)
        torch._dynamo.graph_break()
        return self.net(y.cos() + x.sin())


class WritesTheBatchAfterwards(Buffered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2.0
        torch._dynamo.graph_break()
        x.mul_(0.5)
        torch._dynamo.graph_break()
        return self.net(y.cos() + x.sin())


class ReturnsAPassedResult(Buffered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.steps(x)[1]

    def steps(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2.0
        torch._dynamo.graph_break()
        z = self.net(y.cos())
        torch._dynamo.graph_break()
        return y, z + self.net(y)


class PrintsInTheMiddle(Buffered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x - self.mean) @ self.mix
        print(float(y.sum()))
        return self.net(torch.tanh(y))


class AutocastInside(Buffered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.net((x * 2.0) @ self.mix)
        return y.float() + ((x * 3.0) @ self.mix)[:, :2]


class BreaksInsideOfAutocast(Buffered):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = (x * 2.0) @ self.mix
            torch._dynamo.graph_break()
            z = self.net(y @ self.mix.t())
        w = (x * 3.0) @ self.mix
        torch._dynamo.graph_break()
        return z.float() + (w @ self.mix)[:, :2]


class LeavesAutocast(Buffered):
    """The results made under autocast are used where there is none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = (x * 2.0) @ self.mix
        torch._dynamo.graph_break()
        return self.net((y.float() @ self.mix).cos())


def training(make_model: Callable[[], nn.Module]) -> Case:
    return Case("", make_model, rows, CASES[5].loss, True)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("cut", ["maximal", "auto", "none"])
@pytest.mark.parametrize(
    ("make_model", "moves"),
    [
        (ThreeGraphsAndABranch, ["abs", "log1p", "gt", "sin"]),
        (ReadsAnItem, ["abs", "max"]),
        (PassesAView, ["reshape", "cos", "mul"]),
        (PassesTwoViewsOfOneValue, []),
        (WritesAPassedResult, ["mul", "sin"]),
        (WritesTheBatchAfterwards, ["mul"]),
        (ReturnsAPassedResult, ["mul", "cos"]),
        (PrintsInTheMiddle, ["sub", "matmul", "sum", "tanh"]),
        (AutocastInside, ["mul", "matmul"]),
        (BreaksInsideOfAutocast, ["mul", "matmul", "t"]),
        (LeavesAutocast, ["mul", "matmul"]),
    ],
)
def test_cut_model_of_several_graphs_matches_eager(
    make_model: Callable[[], nn.Module], moves: list[str], cut: Any, capfd: Any
) -> None:
    case = training(make_model)
    pool = InProcessPool(batches_of(case))
    model = offload(fresh(make_model), pool, cut=cut, verify_every=2)
    trace = train(model, pool, case.loss)
    printed = capfd.readouterr().out
    assert trace == eager_trace(case)
    assert printed == capfd.readouterr().out
    assert pool.plan is not None and pool.plan.refused is None
    if cut == "maximal":
        moved = [call.operator.partition(" at ")[0] for call in pool.plan.moved]
        assert not set(moves) - set(moved)
        assert not moves or pool.shipped_count
    assert not torch.is_autocast_enabled("cpu")
    detach(model)
    assert not pool.prefixes


def test_moved_operators_run_in_no_trainer_graph() -> None:
    case = training(ThreeGraphsAndABranch)
    pool = InProcessPool(batches_of(case))
    model = offload(fresh(case.make_model), pool, cut="maximal")
    train(model, pool, case.loss)
    batch = pool.deliver(case.make_batch(0))
    model(batch[0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(batch[0])
    ran = {event.key for event in profile.key_averages()}
    assert "aten::linear" in ran
    assert not ran & {"aten::mul", "aten::abs", "aten::log1p", "aten::max", "aten::sin"}


@pytest.mark.parametrize("make_model", [Buffered, BreaksInsideOfAutocast])
def test_alternating_ambient_autocast_matches_eager(make_model: Callable[[], nn.Module]) -> None:
    class Plain(Buffered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net((x * 2.0) @ self.mix)

    make_model = Plain if make_model is Buffered else make_model
    pool = InProcessPool([])
    model, reference = offload(fresh(make_model), pool, cut="maximal"), fresh(make_model)
    for use_autocast in (True, False, True, False, True):
        batch = pool.deliver(rows(0)[0])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=use_autocast):
            assert bits(model(batch)) == bits(reference(batch.clone()))
    assert pool.plan is not None and pool.plan.moved


def test_error_inside_autocast_region_restores_autocast() -> None:
    class Fails(Buffered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = (x * 2.0) @ self.mix[: x.shape[1]]
                return self.net(y[:, : x.shape[1]])

    pool = InProcessPool([])
    model = offload(fresh(Fails), pool, cut="maximal")
    for _ in range(3):
        model(pool.deliver(torch.randn(10, 20)))
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model.net(torch.randn(10, 3))
        with pytest.raises(RuntimeError):
            model(pool.deliver(torch.randn(10, 25)))
        assert not torch.is_autocast_enabled("cpu")


def test_other_batch_sizes_with_several_graphs_match_eager() -> None:
    pool = InProcessPool([])
    model = offload(fresh(ThreeGraphsAndABranch), pool, cut="maximal", verify_every=1)
    reference = fresh(ThreeGraphsAndABranch)
    for count in (10, 10, 7, 7, 3, 10, 1, 12, 10):
        batch = pool.deliver(torch.randn(count, 20))
        assert bits(model(batch)) == bits(reference(batch.clone()))
    assert pool.plan is not None and pool.plan.moved
    assert pool.shipped_count > 9


def test_buffer_change_takes_effect_in_every_graph() -> None:
    pool = InProcessPool([])
    model = offload(fresh(ThreeGraphsAndABranch), pool, cut="maximal", verify_every=1)
    reference = fresh(ThreeGraphsAndABranch)
    for step in range(8):
        if step in (3, 5):
            for m in (model, reference):
                m.mean.add_(0.125)
        batch = pool.deliver(torch.randn(10, 20))
        assert bits(model(batch)) == bits(reference(batch.clone()))


def test_hooks_fire_in_a_model_of_several_graphs() -> None:
    calls: list[str] = []
    pool = InProcessPool([])
    model = fresh(TwoGraphs)
    model.net.register_forward_hook(lambda *_: calls.append("net"))
    model.register_forward_hook(lambda *_: calls.append("model"))
    offload(model, pool, cut="maximal")
    for _ in range(4):
        model(pool.deliver(torch.randn(10, 20)))
    assert calls == ["net", "model"] * 4


def training_step(model: nn.Module) -> Callable[[Any], torch.Tensor]:
    def step(batch: Any) -> torch.Tensor:
        inputs = batch["x"].to("cpu").float() / 3
        return F.cross_entropy(model(inputs[:, :20]), batch["label"].clamp(max=1))

    return step


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def step(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.model(batch["x"].float() - 1), batch["label"])


def wider(k: int) -> Any:
    x, label = rows(k)
    return {"x": torch.cat([x, x], 1)[:, :20].double(), "label": label}


@pytest.mark.parametrize("make_step", [training_step, lambda model: Trainer(model).step])
def test_cut_training_step_matches_eager(make_step: Any) -> None:
    expected = train(fresh(PrintsInTheMiddle), map(wider, range(6)), lambda m, b: make_step(m)(b))
    model = fresh(PrintsInTheMiddle)
    pool = InProcessPool([wider(k) for k in range(6)])
    own = make_step(model)
    step = offload(own, pool, cut="maximal", verify_every=2)
    assert step is not own and step.__name__ == own.__name__
    assert train(model, pool, lambda _, batch: step(batch)) == expected
    assert pool.plan is not None and pool.plan.refused is None
    moved = {call.operator.partition(" at ")[0] for call in pool.plan.moved}
    assert {"matmul", "tanh"} <= moved and pool.shipped_count
    assert detach(step) == own
    assert not pool.prefixes and pool.plan is None


def test_cut_step_that_runs_the_optimizer_matches_eager(caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo's way of running an optimizer gives different bits from eager; Python runs it here."""

    def run(pool: Any, *, cut: bool) -> list[bytes]:
        model = fresh(Buffered)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def step(batch: Any) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model.net((batch[0] - model.mean) @ model.mix), batch[1])
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = offload(step, pool, cut="maximal") if cut else step
        return [
            bits(value) for batch in pool for value in (step(batch), *model.state_dict().values())
        ]

    pool = InProcessPool([rows(k) for k in range(6)])
    assert run(pool, cut=True) == run([rows(k) for k in range(6)], cut=False)
    assert pool.plan is not None and [c.operator.partition(" at ")[0] for c in pool.plan.moved] == [
        "sub",
        "matmul",
    ]
    assert not warnings_of(caplog)


def test_exported_program_is_rejected_with_advice() -> None:
    program = torch.export.export(nn.Linear(2, 2), (torch.zeros(3, 2),))
    with pytest.raises(TypeError, match=r"ExportedProgram.*offload\(program\.module\(\)"):
        offload(program, InProcessPool([]))  # type: ignore[type-var]


class Named(Buffered):
    """Each name makes Dynamo capture another graph."""

    def forward(self, x: torch.Tensor, *, name: str) -> torch.Tensor:
        return self.net((x * float(len(name))).cos())


def test_prefixes_of_unused_graphs_are_withdrawn() -> None:
    pool = InProcessPool([])
    model, reference = offload(fresh(Named), pool, cut="maximal"), fresh(Named)
    for call in range(2 * UNUSED_CALLS_MAX + 5):
        name = "name"[: 1 + min(call, 3)]
        batch = pool.deliver(rows(call)[0])
        assert bits(model(batch, name=name)) == bits(reference(batch.clone(), name=name))
        if call == 5:
            assert len(pool.prefixes) == 4
    assert len(pool.prefixes) == 1
    assert pool.plan is not None and pool.plan.moved
    for _ in range(3):  # it is planned again when it reappears
        batch = pool.deliver(rows(0)[0])
        assert bits(model(batch, name="n")) == bits(reference(batch.clone(), name="n"))
    assert len(pool.prefixes) == 2


def test_rare_graph_is_replanned_only_a_few_times() -> None:
    pool = InProcessPool([])
    model, reference = offload(fresh(Named), pool, cut="maximal"), fresh(Named)
    counts = []
    for call in range(10 * UNUSED_CALLS_MAX):
        name = "seldom" if call % (2 * UNUSED_CALLS_MAX) < 2 else "often"
        batch = pool.deliver(rows(call)[0])
        assert bits(model(batch, name=name)) == bits(reference(batch.clone(), name=name))
        counts.append(len(pool.prefixes))
    assert counts[: 6 * UNUSED_CALLS_MAX].count(2) > 0
    assert set(counts[-3 * UNUSED_CALLS_MAX :]) == {1}


def test_prefixes_for_other_batch_shapes_are_kept() -> None:
    class Doubled(Buffered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net((x * 2.0).cos())

    pool = InProcessPool([])
    model, reference = offload(fresh(Doubled), pool, cut="maximal"), fresh(Doubled)
    for call in range(3 * UNUSED_CALLS_MAX):
        batch = pool.deliver(torch.randn((7, 3, 20) if call < 3 else (10, 20)))
        assert bits(model(batch)) == bits(reference(batch.clone()))
    assert len(pool.prefixes) == 2


def test_prefixes_are_withdrawn_after_dynamo_reset() -> None:
    pool = InProcessPool([])
    model = offload(fresh(Named), pool, cut="maximal")
    model(pool.deliver(rows(0)[0]), name="na")
    assert len(pool.prefixes) == 1
    torch._dynamo.reset()
    gc.collect()
    for _ in range(2 * UNUSED_CALLS_MAX):
        model(pool.deliver(rows(0)[0]), name="n")
    assert len(pool.prefixes) == 1


def test_prefix_of_changed_constant_is_withdrawn() -> None:
    class Shifted(Buffered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net((x @ self.mix).cos())

    pool = InProcessPool([])
    model, reference = offload(fresh(Shifted), pool, cut="maximal"), fresh(Shifted)
    for step in range(6):
        if step == 3:
            for each in (model, reference):
                each.mix.data.mul_(0.5)
        batch = pool.deliver(rows(step)[0])
        assert bits(model(batch)) == bits(reference(batch.clone()))
    assert len(pool.prefixes) == 1
