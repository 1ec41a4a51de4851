# SPDX-License-Identifier: Apache-2.0
"""TorchScript modules and functions train bit-for-bit the same with a cut as without one."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cut_models import CASES
from in_process_pool import InProcessPool
from offload_training import bits, fresh, train, warnings_of
from torch import nn
from torch.nn import functional as F

from penstock.cut.offloading import detach, offload
from penstock.cut.script_models import SETTLED_RUNS, OffloadedScript
from penstock.explanation.explanation import explain
from penstock.graph.sizes import REMEMBERED_MAKERS, REMEMBERED_SIZES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("on_one_thread", "cleared_script_programs"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

CASE_OF = {case.name: case for case in CASES}


@pytest.fixture
def cleared_script_programs() -> Iterator[None]:
    """Scripted modules of one class share their programs, and with them the run counts."""
    torch._C._jit_clear_class_registry()
    torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
    yield


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((20,), 0.25))
        self.net = nn.Sequential(
            nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(torch.clamp((x - self.mean) * 2.0, -3.0, 3.0))


class Branches(Rows):
    """Control flow that only the running program can decide, before and after the operations that
    move."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 0):
            scale = 2.0
        else:
            scale = 3.0
        y = torch.log1p(x.abs())
        z = self.net(y * scale)
        for _ in range(x.size(0) // 4):
            z = z + y.mean()
        return z


def scripted(make_model: Callable[[], nn.Module]) -> Any:
    return torch.jit.script(fresh(make_model))


def rows_of(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, 20, generator=torch.Generator().manual_seed(seed))


def traced(make_model: Callable[[], nn.Module]) -> Any:
    return torch.jit.trace(fresh(make_model), rows_of(10, 0))


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def train_plain_and_cut(
    make: Callable[[], Any], batches: list[Any], loss: Callable[..., torch.Tensor] = loss_of
) -> tuple[Any, InProcessPool]:
    """Trains twice, the second time with a cut, which must make no difference.

    Modules of one class share a program, which gives other bits until it is settled: one training
    precedes both.
    """
    make()
    train(make(), batches, loss)
    expected = train(make(), batches, loss)
    pool = InProcessPool(batches)
    model = offload(make(), pool, cut="maximal", verify_every=2)
    assert train(model, pool, loss) == expected
    return model, pool


def settle(model: Any) -> None:
    """Runs programs, which models of one class share, until they have settled."""
    for seed in range(SETTLED_RUNS):
        model(rows_of(10, seed)).sum().backward()


def used_count(model: Any) -> int:
    return sum(cut.used_count for cut in model.__dict__["forward"]._cuts)


BATCHES = [rows_of(10, seed) for seed in range(SETTLED_RUNS + 6)]


@pytest.mark.parametrize("make_model", [Rows, Branches])
@pytest.mark.parametrize("make", [scripted, traced])
def test_cut_script_module_matches_uncut_training(
    make: Callable[..., Any], make_model: Callable[[], nn.Module]
) -> None:
    model, pool = train_plain_and_cut(lambda: make(make_model), BATCHES)
    assert pool.plan is not None and pool.plan.moved and used_count(model) >= 4


@pytest.mark.parametrize("name", ["resnet", "in_place", "wide_and_deep", "log_mel", "transformer"])
def test_cut_scripted_model_styles_match_uncut_training(name: str) -> None:
    case = CASE_OF[name]
    batches = [case.make_batch(seed % 6) for seed in range(SETTLED_RUNS + 4)]
    model, pool = train_plain_and_cut(lambda: scripted(case.make_model), batches, case.loss)
    assert pool.plan is not None and pool.plan.moved and used_count(model) >= 2


class Resizes(nn.Module):
    """Scripted, `interpolate` branches on the dimensions of its input; most branches raise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((3, 1, 1), 0.5))
        self.conv = nn.Conv2d(3, 2, 3)


class ResizesToASize(Resizes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x.float().permute(0, 3, 1, 2) / 255.0 - self.mean).contiguous()
        x = F.interpolate(x, size=[9, 7], mode="bilinear", align_corners=False, antialias=True)
        return self.conv(x).mean(dim=(2, 3))


class ResizesByFactors(Resizes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 3:
            x = x.unsqueeze(0)
        x = F.interpolate(x.permute(0, 3, 1, 2).float(), scale_factor=[0.5, 0.5], mode="nearest")
        return self.conv(x * 2.0 - self.mean).mean(dim=(2, 3))


class Squeezes(Resizes):
    """The dimensions depend on a size, which may differ in the next batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float().permute(0, 3, 1, 2).squeeze()
        if x.dim() == 3:
            x = x.unsqueeze(0)
        return self.conv(x).mean(dim=(2, 3))


def images_of(size: int, seed: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size, 12, 10, 3), dtype=torch.uint8, generator=draws)


IMAGES = [images_of(4, seed) for seed in range(SETTLED_RUNS + 6)]


@pytest.mark.parametrize(
    ("make_model", "moved"),
    [
        (ResizesToASize, ["to", "permute", "div", "sub", "contiguous", "_upsample_bilinear2d_aa"]),
        (ResizesByFactors, ["permute", "to", "upsample_nearest2d", "mul", "sub"]),
    ],
)
def test_scripted_interpolate_moves(make_model: Callable[[], nn.Module], moved: list[str]) -> None:
    _, pool = train_plain_and_cut(lambda: scripted(make_model), IMAGES)
    assert pool.plan is not None and pool.plan.refused is None
    names = [call.operator.split(" at ")[0].removeprefix("aten::") for call in pool.plan.moved]
    assert [name for name in names if name in moved] == moved, names


def test_scripted_squeeze_matches_for_batches_of_one() -> None:
    batches = [*IMAGES[:-2], images_of(1, 1), images_of(4, 1)]
    model, pool = train_plain_and_cut(lambda: scripted(Squeezes), batches)
    assert pool.plan is not None and pool.plan.refused is None and used_count(model)


class TwoViews(Rows):
    """Gives a value and a view of it, and an input's view."""

    def forward(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        y = torch.log1p(x.abs())
        return y, y[0], x.view(-1), self.net(y)


@pytest.mark.parametrize("make", [scripted, fresh])
def test_writes_to_aliased_script_results_match_uncut(
    make: Callable[..., Any],
) -> None:
    pair = [make(TwoViews), offload(make(TwoViews), pool := InProcessPool([]), cut="maximal")]
    for seed in range(SETTLED_RUNS + 8):
        batch, results = rows_of(10, seed), []
        for index, model in enumerate(pair):
            torch.manual_seed(seed)
            given = batch.clone() if index == 0 else pool.deliver(batch.clone())
            y, row, flat, logits = model(given)
            logits.sum().backward()
            y += 1
            given += 2
            results.append([bits(one) for one in (y, row, flat, logits)])
        assert results[0] == results[1]
    assert pool.plan is not None and "log1p" in str(pool.plan.moved)


def test_script_mode_size_and_foreign_batches_match_uncut() -> None:
    settle(scripted(Rows))
    make = [scripted(Rows), offload(scripted(Rows), pool := InProcessPool([]), cut="maximal")]
    for seed in range(3 * SETTLED_RUNS + 8):
        batch = rows_of((10, 6, 3)[seed % 3], seed)
        results = []
        for index, model in enumerate(make):
            model.train(seed % 5 != 0)
            torch.manual_seed(seed)
            is_foreign = index == 0 or seed % 7 == 0
            result = model(batch if is_foreign else pool.deliver(batch))
            result.sum().backward()
            results.append([bits(result), *(bits(p.grad) for p in model.parameters())])
        assert results[0] == results[1]
    assert used_count(make[1]) > 4


def test_script_buffer_change_takes_effect() -> None:
    pair = [scripted(Rows), offload(scripted(Rows), pool := InProcessPool([]), cut="maximal")]
    for seed in range(SETTLED_RUNS + 12):
        batch = rows_of(10, seed)
        if seed == SETTLED_RUNS + 3:
            for model in pair:
                model.mean.fill_(0.5)
        torch.manual_seed(seed)
        expected = pair[0](batch)
        torch.manual_seed(seed)
        assert bits(pair[1](pool.deliver(batch))) == bits(expected)
    assert used_count(pair[1]) > 2


def test_wrong_worker_results_are_recomputed_by_the_trainer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = [scripted(Rows), offload(scripted(Rows), pool := InProcessPool([]), cut="maximal")]
    pool.corrupts_results = True
    for seed in range(SETTLED_RUNS + 4):
        batch = rows_of(10, seed)
        torch.manual_seed(seed)
        expected = pair[0](batch)
        torch.manual_seed(seed)
        assert bits(pair[1](pool.deliver(batch))) == bits(expected)
    assert any("differs from the trainer's result" in message for message in warnings_of(caplog))


def test_remembered_makers_and_refused_sizes_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither had a bound."""
    model, pool = train_plain_and_cut(lambda: scripted(Rows), BATCHES)
    cut = model.__dict__["forward"]._cuts[-1]
    cut.makers.update(range(REMEMBERED_MAKERS))
    pool.maker = REMEMBERED_MAKERS
    model(pool.deliver(rows_of(10, 99)))
    assert cut.makers == {pool.maker}
    cut.refused.update(((), number, True, True) for number in range(REMEMBERED_SIZES))
    # The sizes for which TorchScript selects other kernels depend on its version.
    monkeypatch.setattr(OffloadedScript, "_difference", lambda *_: "results")
    model(pool.deliver(rows_of(6, 99)))
    [(sizes, *_)] = cut.refused
    assert sizes == ((6, 20),)


def test_state_dict_copies_and_files_are_those_of_the_module() -> None:
    model = scripted(Rows)
    names, former = list(model.state_dict()), model.forward
    pool = InProcessPool([])
    assert offload(model, pool, cut="maximal") is model
    for seed in range(SETTLED_RUNS + 2):
        model(pool.deliver(rows_of(10, seed)))
    assert list(model.state_dict()) == names
    file = io.BytesIO()
    torch.jit.save(model, file)
    file.seek(0)
    batch = rows_of(10, 99)
    results = [
        bits(twin.eval()(pool.deliver(batch)))
        for twin in (torch.jit.load(file), copy.deepcopy(model), detach(model))
    ]
    assert results[0] == results[1] == results[2]
    assert model.forward is former


def test_cut_script_function_matches_uncut() -> None:
    weight = torch.randn(20, 2, requires_grad=True)

    @torch.jit.script
    def step(x: torch.Tensor, weight: torch.Tensor, power: int = 2) -> torch.Tensor:
        return torch.log1p(x.abs()).pow(power).matmul(weight).sum()

    pool = InProcessPool([])
    offloaded = offload(step, pool, cut="maximal")
    for seed in range(SETTLED_RUNS + 4):
        batch = rows_of(10, seed)
        found = []
        for function, x in ((step, batch), (offloaded, pool.deliver(batch))):
            weight.grad = None
            result = function(x, weight=weight)
            result.backward()
            found.append((bits(result), bits(weight.grad)))
        assert found[0] == found[1]
    assert pool.plan is not None and len(pool.plan.moved) == 3 and pool.shipped_count
    assert detach(offloaded) is step
    plan = explain(step, [rows_of(10, 0), weight.detach()], cut="maximal")
    assert plan.refused is None and plan.moved


class TakesADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 2)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.net(batch["x"].abs())


def test_script_model_taking_a_dict_is_refused_with_reason() -> None:
    pool = InProcessPool([{"x": torch.randn(4, 6)}])
    model = offload(torch.jit.script(TakesADict()), pool)
    for batch in pool:
        model(batch)
    assert pool.plan is not None and "list or a dict" in str(pool.plan.refused)
