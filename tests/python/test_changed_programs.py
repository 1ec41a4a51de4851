# SPDX-License-Identifier: Apache-2.0
"""A program may change anything between two steps. Training continues bit-for-bit as without a cut,
even where Dynamo has no guard on the changed value."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from in_process_pool import InProcessPool
from offload_training import bits, fresh, generator_states, warnings_of
from torch import nn

from penstock import DataLoader, offload, stateless

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_one_thread")]


class Scale(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0


class Shift(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 + 1.0


class Deep(nn.Module):
    """A module nested three deep whose configuration is a list inside a tuple."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.cfg = (1.0, [1.0])
        self.inner = Deep(depth - 1) if depth > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.cfg[1][0])


class Model(nn.Module):
    """Preprocessing that depends on nearly everything, then a network with a dropout and a batch
    norm."""

    level = "1"

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()
        self.deep = Deep()
        self.net = nn.Sequential(
            nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2)
        )

    def pre(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * float(os.getenv("PENSTOCK_TEST_LEVEL", "1"))
        x = self.deep(self.scale(self.pre(x)))
        return self.net(F.normalize(x) + x * 0.1)


def set_variable(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("PENSTOCK_TEST_LEVEL", "3")


def replace_method(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Model, "pre", lambda self, x: x - 1.0)


def replace_forward_of_part(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scale, "forward", lambda self, x: x * 3.0)


def replace_function_of_torch(model: Model, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(F, "normalize", lambda x: x * 0.25)


def shadow_part(model: Model, patch: pytest.MonkeyPatch) -> None:
    object.__setattr__(model, "scale", Shift())


def change_nested_list(model: Model, patch: pytest.MonkeyPatch) -> None:
    model.deep.inner.inner.cfg[1][0] = 2.0


def add_global_hook(model: Model, patch: pytest.MonkeyPatch) -> None:
    def hook(module: nn.Module, args: Any, result: Any) -> Any:
        return result * 1.5 if isinstance(module, Scale) else None

    handle = nn.modules.module.register_module_forward_hook(hook)
    patch.setattr(model, "undo", handle.remove, raising=False)


@dataclass(frozen=True)
class Change:
    make: Callable[[Model, pytest.MonkeyPatch], None]
    name: str  # from the warning; none where Dynamo guards it, in some versions of torch
    is_seen_at_once: bool = True  # also in the middle of an epoch


CHANGES = [
    Change(set_variable, "os.environ['PENSTOCK_TEST_LEVEL']"),
    Change(replace_method, "Model.pre"),
    Change(replace_forward_of_part, "Scale.forward"),
    Change(replace_function_of_torch, ""),
    Change(shadow_part, "Model.scale", is_seen_at_once=False),
    Change(change_nested_list, "", is_seen_at_once=False),
    Change(add_global_hook, "a hook for all modules"),
]


@pytest.fixture(autouse=True)
def _variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PENSTOCK_TEST_LEVEL", "1")
    yield


def batches() -> list[torch.Tensor]:
    return [torch.randn(6, 20, generator=torch.Generator().manual_seed(k)) for k in range(5)]


def trained(
    model: Any,
    pool: InProcessPool,
    change: Callable[[], None],
    step: int = 0,
    call: Callable[[Any, torch.Tensor], torch.Tensor] = lambda model, x: model(x),
) -> list[bytes]:
    """Three epochs; `change` happens at `step` of the second one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    trace: list[bytes] = []
    torch.manual_seed(5)
    for epoch in range(3):
        pool.epoch = epoch
        for place, x in enumerate(pool):
            if (epoch, place) == (1, step):
                change()
            optimizer.zero_grad()
            loss = call(model, x).square().sum()
            loss.backward()
            optimizer.step()
            trace += [bits(loss), *(bits(value) for value in model.state_dict().values())]
            trace += generator_states()
    assert all(bool(value.isfinite().all()) for value in model.parameters())
    return trace


def compared(
    change: Change,
    cut: Any,
    step: int,
    **options: Any,
) -> InProcessPool:
    pool = InProcessPool(batches())
    traces = []
    for is_ours in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            model: Any = fresh(Model)
            source = pool if is_ours else InProcessPool(batches())
            if is_ours:
                model = offload(model, pool, cut=cut, **options)
            traces.append(trained(model, source, lambda: change.make(model, patch), step))  # noqa: B023
            undo = getattr(model, "undo", None)
            if undo is not None:
                undo()
    assert traces[0] == traces[1]
    return pool


@pytest.mark.parametrize("cut", ["maximal", "auto"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.make.__name__)
def test_change_between_epochs_reaches_an_offloaded_model(
    change: Change, cut: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """From the change on the losses were the losses of the graph that was captured before."""
    pool = compared(change, cut, step=0)
    if cut == "maximal":
        assert pool.shipped_count
    if cut == "maximal" and change.name:
        (warning,) = warnings_of(caplog)
        assert change.name in warning
        assert pool.plan is not None
        assert change.name in str(pool.plan.refused)


@pytest.mark.parametrize(
    "change", [c for c in CHANGES if c.is_seen_at_once], ids=lambda change: change.make.__name__
)
def test_change_within_an_epoch_takes_effect_at_the_next_call(change: Change) -> None:
    pool = compared(change, "maximal", step=2)
    assert pool.shipped_count


@pytest.mark.parametrize("change", [change_nested_list, shadow_part])
def test_unguarded_change_is_found_by_the_next_comparison(change: Any) -> None:
    """One batch in `verify_every` is run by Python; here it is every one."""
    compared(Change(change, ""), "maximal", step=2, verify_every=1)


class Batches(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.batches = batches()

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.batches[index]


class LargeTable(Model):
    """Adds the last element of a buffer of 4 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(50_000, 20))

    def pre(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[-1]


def write_bypassing_the_version(model: Model, patch: pytest.MonkeyPatch) -> None:
    model.table.numpy()[-1] = 0.5  # type: ignore[operator,union-attr]


def plainly(loader: Any) -> Iterator[torch.Tensor]:
    return iter(loader)


def prefetched(loader: Any) -> Iterator[torch.Tensor]:
    if isinstance(loader, DataLoader):
        loader.start_prefetch()
    return iter(loader)


def resumed(loader: Any) -> Iterator[torch.Tensor]:
    """Each epoch starts from a state, which makes no difference: it is of the same place."""
    if isinstance(loader, DataLoader):
        loader.load_state_dict(loader.state_dict())
    return iter(loader)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("persistent_workers", [True, False])
@pytest.mark.parametrize("begin", [plainly, prefetched, resumed])
@pytest.mark.parametrize(
    "kind, change",
    [(Model, change_nested_list), (Model, shadow_part), (LargeTable, write_bypassing_the_version)],
)
def test_first_batch_of_each_loader_epoch_is_compared(
    kind: Any, change: Any, begin: Any, persistent_workers: bool
) -> None:
    """Without per-batch seeds, all epochs had the same number."""
    options: dict[str, Any] = {
        "batch_size": None,
        "num_workers": 1,
        "persistent_workers": persistent_workers,
    }
    traces = []
    for is_ours in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            loader: Any
            model: Any = fresh(kind)
            if is_ours:
                loader = DataLoader(Batches(), **options)
                model = offload(model, loader, cut="maximal")
            else:
                loader = torch.utils.data.DataLoader(Batches(), **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            trace = []
            torch.manual_seed(5)
            for epoch in range(3):
                if epoch == 2:
                    change(model, patch)
                for x in begin(loader):
                    optimizer.zero_grad()
                    loss = model(x).square().sum()
                    loss.backward()
                    optimizer.step()
                    trace += [bits(loss), *(bits(value) for value in model.parameters())]
            traces.append(trace)
    assert all(bool(value.isfinite().all()) for value in model.parameters())
    assert traces[0] == traces[1]
    assert loader.stats().boundary_batches


_runs = [0]


@stateless
@torch.library.custom_op("penstock_test::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    _runs[0] += 1
    return x.clone()


counted.register_fake(torch.empty_like)
counted.register_autograd(lambda ctx, gradient: gradient)


class Counted(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return counted(super().forward(x))  # type: ignore[no-any-return]


def test_concurrent_iterators_are_compared_once_each() -> None:
    """Not in each step, although each call belongs to another epoch than the previous one."""
    loader: Any = DataLoader(Batches(), batch_size=None, num_workers=1)
    model = offload(fresh(Counted), loader, cut="maximal")
    runs = []
    for pair in zip(loader, loader, strict=True):
        for x in pair:
            before = _runs[0]
            model(x)
            runs.append(_runs[0] - before)
    assert len(runs) == 10
    assert runs[2:] == [1] * 8


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(20, 8), nn.Linear(8, 2)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.trunk(x * 2.0 - 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def test_method_replaced_to_detach_gradients_takes_effect() -> None:
    """The results are the same, and the trunk was trained."""
    features, traces = Trunk.features, []
    for is_ours in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            pool = InProcessPool(batches())
            model: Any = fresh(Trunk)
            if is_ours:
                model = offload(model, pool, cut="maximal")

            def freeze(patch: pytest.MonkeyPatch = patch) -> None:
                patch.setattr(Trunk, "features", lambda self, x: features(self, x).detach())

            traces.append(trained(model, pool, freeze, step=2))
    assert traces[0] == traces[1]
    assert pool.plan is not None
    assert pool.plan.moved


def test_irrelevant_change_keeps_the_cut(caplog: pytest.LogCaptureFixture) -> None:
    def set_other(model: Model, patch: pytest.MonkeyPatch) -> None:
        patch.setenv("PENSTOCK_TEST_OTHER", "1")

    pool = compared(Change(set_other, ""), "maximal", step=2)
    assert not warnings_of(caplog)
    assert pool.plan is not None
    assert pool.plan.moved


class SideEffects(Model):
    """Counts, prints, writes to a buffer and draws, each once per call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0
        self.own = torch.Generator().manual_seed(3)
        self.history: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(len(self.history))
        self.seen += 1
        x.add_(1.0)
        return super().forward(x * 2.0 + torch.rand(()))


class Prints(SideEffects):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("forward")
        return super().forward(x)


@pytest.mark.long("1-Prints", "1000-Prints")
@pytest.mark.parametrize("kind", [SideEffects, Prints])
@pytest.mark.parametrize("verify_every", [1, 2, 1000])
def test_comparison_has_no_side_effects(
    kind: Any, verify_every: int, capsys: pytest.CaptureFixture[str]
) -> None:
    lives = []
    for is_ours in (False, True):
        pool = InProcessPool(batches())
        model: Any = fresh(kind)
        hooked: list[str] = []
        model.register_forward_pre_hook(lambda *_, h=hooked: h.append("before"))  # type: ignore[misc]
        model.register_forward_hook(lambda *_, h=hooked: h.append("after"))  # type: ignore[misc]
        model.net.register_forward_hook(lambda *_, h=hooked: h.append("inside"))  # type: ignore[misc]
        if is_ours:
            model = offload(model, pool, cut="maximal", verify_every=verify_every)
        trace = trained(model, pool, lambda: None)
        lives.append((trace, hooked, model.calls, model.history, capsys.readouterr().out))
    assert lives[0] == lives[1]


def test_change_reaches_a_model_of_several_graphs() -> None:
    class Broken(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2.0
            torch._dynamo.graph_break()
            return super().forward(x)

    traces = []
    for is_ours in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            pool = InProcessPool(batches())
            model: Any = fresh(Broken)
            if is_ours:
                model = offload(model, pool, cut="maximal")
            traces.append(trained(model, pool, lambda: set_variable(model, patch), 2))  # noqa: B023
    assert traces[0] == traces[1]
    assert pool.plan is not None
    assert pool.plan.moved


@pytest.mark.parametrize("is_compiled_first", [True, False])
def test_uncaptured_forward_runs_once_per_call(is_compiled_first: bool) -> None:
    """Dynamo does not capture a frame with a break in a loop, but captures frames that it calls."""

    class Loops(Model):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                self.calls += 1
                torch._dynamo.graph_break()
            return self.net(self.scale(x))

    lives = []
    for is_ours in (False, True):
        pool = InProcessPool(batches())
        model: Any = fresh(Loops)
        if is_compiled_first:
            torch.compile(fresh(Loops), backend="eager")(torch.ones(6, 20))
        if is_ours:
            model = offload(model, pool, cut="maximal", verify_every=1)
        lives.append((trained(model, pool, lambda: None), model.calls))
    second: Any = offload(fresh(Loops), InProcessPool(batches()), cut="maximal")
    second(torch.ones(6, 20))
    assert lives[0] == lives[1]
    assert second.calls == 2


def test_change_reaches_an_offloaded_training_step() -> None:
    traces = []
    for is_ours in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            pool = InProcessPool(batches())
            model: Any = fresh(Model)

            def step(x: torch.Tensor) -> torch.Tensor:
                return model(x.double().float() / 3.0)  # noqa: B023

            run = offload(step, pool, cut="maximal") if is_ours else step
            traces.append(
                trained(
                    model,
                    pool,
                    lambda: replace_method(model, patch),  # noqa: B023
                    call=lambda _, x: run(x),  # noqa: B023
                )
            )
    assert traces[0] == traces[1]
    assert pool.shipped_count


def test_transforms_in_the_loop_are_compared_with_their_batches() -> None:
    def call(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x.double().float().div_(3.0))

    traces = []
    for is_ours in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            pool = InProcessPool(batches())
            model: Any = fresh(Model)
            if is_ours:
                model = offload(model, pool, cut="maximal")
            traces.append(
                trained(model, pool, lambda: change_nested_list(model, patch), call=call)  # noqa: B023
            )
    assert traces[0] == traces[1]
    assert pool.shipped_count


class Returns(Model):
    """Returns its input and its attribute in addition to its results."""

    def __init__(self) -> None:
        super().__init__()
        self.scale_of_loss = nn.Parameter(torch.ones(()))
        self.table = [torch.arange(3.0)]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), y, self.scale_of_loss, self.table[0]


def test_tensors_returned_unchanged_are_no_difference(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = InProcessPool([(x, torch.ones(6)) for x in batches()])
    model = offload(fresh(Returns), pool, cut="maximal", verify_every=2)
    for epoch in range(2):
        pool.epoch = epoch
        for x, y in pool:
            assert model(x, y)[1] is y
    assert not warnings_of(caplog)
    assert pool.plan is not None
    assert pool.plan.moved


class PythonsRandom(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * random.random())


def test_comparison_preserves_python_random_state() -> None:
    lives = []
    for is_ours in (False, True):
        pool = InProcessPool(batches())
        model: Any = fresh(PythonsRandom)
        random.seed(3)
        if is_ours:
            model = offload(model, pool, cut="maximal", verify_every=2)
        lives.append((trained(model, pool, lambda: None), random.getstate()))
    assert lives[0] == lives[1]


def test_comparison_is_invisible_to_saved_tensor_hooks() -> None:
    lives = []
    for is_ours in (False, True):
        pool = InProcessPool(batches())
        model: Any = fresh(Model)
        if is_ours:
            model = offload(model, pool, cut="maximal", verify_every=1)
        saved: list[torch.Size] = []

        def call(
            model: Any,
            x: torch.Tensor,
            saved: list[torch.Size] = saved,
            pool: InProcessPool = pool,
        ) -> torch.Tensor:
            if pool.epoch == 0:
                return model(x)  # type: ignore[no-any-return]  # a cut is planned with a run, too

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                saved.append(tensor.shape)
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return model(x)  # type: ignore[no-any-return]

        trace = trained(model, pool, lambda: None, call=call)
        lives.append((trace, saved))
    assert lives[0] == lives[1]


class SingularValues(Model):
    """Computes the singular values by another routine, with other last bits, when a dispatch mode
    is active."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.linalg.svdvals(x).sum()


def test_comparison_runs_the_same_kernels_as_the_program(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = InProcessPool(batches())
    model = offload(fresh(SingularValues), pool, cut="maximal", verify_every=1)
    trained(model, pool, lambda: None)
    assert not warnings_of(caplog)
    assert pool.plan is not None
    assert pool.plan.moved


_noise = itertools.count(1)


@stateless
@torch.library.custom_op("penstock_test::unsteady", mutates_args=())
def unsteady(x: torch.Tensor) -> torch.Tensor:
    """Stands for a kernel that adds in a different order each time."""
    return x * (1.0 + 1e-6 * next(_noise))


unsteady.register_fake(torch.empty_like)
unsteady.register_autograd(lambda ctx, gradient: gradient)


class Unsteady(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return unsteady(super().forward(x))  # type: ignore[no-any-return]


def test_nondeterministic_kernel_is_no_difference(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = InProcessPool(batches())
    trained(offload(fresh(Unsteady), pool, cut="maximal", verify_every=2), pool, lambda: None)
    assert not warnings_of(caplog)
    assert pool.plan is not None
    assert pool.plan.moved


def test_change_reaches_a_model_with_nondeterministic_kernels() -> None:
    results = []
    for is_ours in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            pool = InProcessPool(batches())
            model: Any = fresh(Unsteady).eval()
            if is_ours:
                model = offload(model, pool, cut="maximal")
            with torch.no_grad():
                for place, x in enumerate(pool):
                    if place == 2:
                        set_variable(model, patch)
                    results.append(model(x))
    for plain, ours in zip(results[:5], results[5:], strict=True):
        torch.testing.assert_close(plain, ours, rtol=1e-3, atol=1e-4)


class Scaled(nn.Module):
    """Reads a method that the program replaces. With `is_broken` it is captured as two graphs."""

    is_broken = False

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)

    def factor(self) -> float:
        return 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.factor()
        if self.is_broken:
            torch._dynamo.graph_break()
        return self.head(x + 1)


class Twofold(Scaled):
    is_broken = True


@pytest.mark.parametrize("is_new", [False, True], ids=["one model", "a model for each"])
@pytest.mark.parametrize(
    ("kind", "allow_random"), [(Scaled, True), (Twofold, True), (Twofold, False)]
)
def test_change_reaches_models_that_are_not_compared(
    kind: type[Scaled], allow_random: bool, is_new: bool
) -> None:
    """Nor does another model of the class run the graph that was captured before the change."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(4, 6, generator=generator) for _ in range(4)]
    results: list[list[bytes]] = []
    for is_ours in (False, True):
        found: list[bytes] = []
        model: Any = None
        with pytest.MonkeyPatch.context() as patch:
            for factor in (lambda _: 2.0, lambda _: 3.0, lambda _: 2.0):
                patch.setattr(kind, "factor", factor)
                if model is None or is_new:
                    pool, model = InProcessPool(rows), fresh(kind)
                    if is_ours:
                        offload(model, pool, cut="maximal", allow_random=allow_random)
                found += [bits(model(row)) for row in pool]
        results.append(found)
    assert results[0] == results[1]


def test_first_capture_is_not_taken_for_a_program_change() -> None:
    """Dynamo then replaces two methods of `torch.nn.Module`. Because of it, the first model of each
    program was captured twice, and again moved operations that a worker had computed wrongly."""
    program = (
        "import torch; from penstock.cut.eager_comparison import ProgramStamp, ProgramState; "
        "model = torch.nn.Linear(2, 2); parts = list(model.modules()); "
        "state, stamp = ProgramState(parts), ProgramStamp(parts); "
        "torch.compile(model, backend='eager')(torch.ones(1, 2)); "
        "print(state.changes(), stamp.is_current())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[] True\n", 0), done.stderr
