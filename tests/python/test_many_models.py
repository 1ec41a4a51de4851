# SPDX-License-Identifier: Apache-2.0
"""Many models in one process: each is cut as the first one was, and no resource of a deleted model
is kept. Torch's Dynamo is never reset here, since programs do not reset it."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from in_process_pool import InProcessPool
from offload_training import bits
from torch import nn
from torch.optim.swa_utils import AveragedModel

from penstock import detach, offload
from penstock.compat.dynamo import capture_count
from penstock.cut.captured_graphs import UNUSED_MAX, CapturedGraph
from penstock.cut.cut_graph import CutGraph

pytestmark = pytest.mark.usefixtures("on_one_thread")


class Classifier(nn.Module):
    """Preprocessing with a large buffer, then a layer whose width is a hyperparameter."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.register_buffer("mean", torch.linspace(0.0, 1.0, 20))
        self.net = nn.Sequential(nn.Linear(20, width), nn.BatchNorm1d(width), nn.Linear(width, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(torch.log1p(x.abs()) - self.mean)


def rows(seed: int, count: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [10] * (count - 1) + [7]
    return [torch.randn(size, 20, generator=generator) for size in sizes]


def fold(model: nn.Module, train: Any, val: Any, epochs: int = 2) -> list[bytes]:
    """Training and validation, and all of their resources."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trace: list[bytes] = []
    for _ in range(epochs):
        model.train()
        for x in train:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            trace.append(bits(loss))
        model.eval()
        with torch.no_grad():
            trace += [bits(model(x)) for x in val]
        trace += [bits(value) for value in model.state_dict().values()]
    return trace


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def is_cut(*pools: InProcessPool) -> bool:
    for pool in pools:
        assert pool.plan is not None
        assert pool.plan.refused is None
        assert pool.plan.moved
        assert pool.shipped_count
    return True


def live(kind: type) -> int:
    gc.collect()
    return sum(isinstance(item, kind) for item in gc.get_objects())


def live_object_counts() -> Counter[str]:
    """Penstock's objects, tensors, modules and graphs, by their types. Torch's caches of sizes hold
    some hundred more, and no more than that."""
    gc.collect()
    kinds = (torch.Tensor, nn.Module, torch.UntypedStorage)
    return Counter(
        str(type(item))
        for item in gc.get_objects()
        if type(item).__module__.startswith("penstock") or issubclass(type(item), kinds)
    )


def run(
    make: Callable[[], nn.Module], seed: int, *, is_detached: bool = True
) -> weakref.ref[nn.Module]:
    """One model with separate loaders, compared with itself without a cut."""
    expected = fold(seeded(seed, make), rows(seed), rows(seed + 1))
    train, val = InProcessPool(rows(seed)), InProcessPool(rows(seed + 1))
    model = offload(seeded(seed, make), train, val, cut="maximal")
    assert fold(model, train, val) == expected
    assert is_cut(train, val)
    if is_detached:
        detach(model)
        assert not train.prefixes
    return weakref.ref(model)


@pytest.mark.long("True")
@pytest.mark.slow
@pytest.mark.parametrize("is_detached", [True, False])
def test_fiftieth_model_is_cut_like_the_first_and_none_is_kept(is_detached: bool) -> None:
    """From the fifth fold on no operation moved, and every model stayed in memory until the process
    ended."""
    counts: list[Counter[str]] = []
    for seed in range(50):
        gone = run(Classifier, seed, is_detached=is_detached)
        gc.collect()
        assert gone() is None
        if seed in (10, 49):
            counts.append(live_object_counts())
    assert counts[1] == counts[0]
    assert live(CutGraph) == 0
    assert capture_count(Classifier.forward.__code__) <= 2 * UNUSED_MAX


@pytest.mark.slow
def test_each_width_of_a_sweep_is_cut_and_memory_stays_bounded() -> None:
    kind: Any = run_cell()
    for width in range(2, 16):
        run(lambda width=width: kind(width), width)  # type: ignore[misc]
    assert capture_count(kind.forward.__code__) <= 2 * UNUSED_MAX
    assert live(CutGraph) == 0


@pytest.mark.slow
def test_model_is_cut_in_each_fold_with_new_loaders() -> None:
    model = Classifier()
    for seed in range(5):
        expected = fold(seeded(seed, Classifier), rows(seed), rows(seed + 1))
        train, val = InProcessPool(rows(seed)), InProcessPool(rows(seed + 1))
        model.load_state_dict(seeded(seed, Classifier).state_dict())
        offload(model, train, val, cut="maximal")
        assert fold(model, train, val) == expected
        assert is_cut(train, val)
        gone = weakref.ref(train)
        del train, val
        gc.collect()
        assert gone() is None
        assert live(CutGraph) == 0


@pytest.mark.slow
def test_coexisting_models_share_their_captures() -> None:
    models, pools = [], []
    for seed in range(12):
        pools.append(InProcessPool(rows(seed)))
        models.append(offload(seeded(seed, Classifier), pools[-1], cut="maximal"))
    for seed, (model, pool) in enumerate(zip(models, pools, strict=True)):
        expected = fold(seeded(seed, Classifier), rows(seed), [])
        assert fold(model, pool, []) == expected
        assert is_cut(pool)
    before = live(CapturedGraph)
    del models, pools, model, pool
    assert live(CapturedGraph) == before
    assert live(CutGraph) == 0


@pytest.mark.slow
def test_averaged_model_is_cut_along_with_its_source_model() -> None:
    for seed in range(10):
        val, reference = InProcessPool(rows(seed)), seeded(seed, Classifier)
        train = InProcessPool(rows(seed))
        model = offload(seeded(seed, Classifier), train, cut="maximal")
        averaged, expected = AveragedModel(model), AveragedModel(reference)
        offload(averaged, val, cut="maximal")
        for _ in range(2):
            assert fold(model, train, [], epochs=1) == fold(reference, rows(seed), [], epochs=1)
            averaged.update_parameters(model)
            expected.update_parameters(reference)
            averaged.eval()
            expected.eval()
            with torch.no_grad():
                for ours, theirs in zip(val, rows(seed), strict=True):
                    assert bits(averaged(ours)) == bits(expected(theirs))
        assert is_cut(train, val)
        detach(averaged)
        detach(model)


@pytest.mark.slow
def test_rerun_notebook_cell_keeps_no_earlier_class() -> None:
    classes = []
    for seed in range(8):
        kind = run_cell()
        run(kind, seed)
        classes.append(weakref.ref(kind))
    del kind
    gc.collect()
    assert not any(kind() for kind in classes)


def run_cell() -> type[nn.Module]:
    """A class with separate code, as a notebook cell makes it each time it is run."""
    cell = (
        "class Cell(Classifier):\n"
        "    def forward(self, x):\n"
        "        return self.net(torch.log1p(x.abs()) - self.mean)\n"
    )
    scope: dict[str, Any] = {"Classifier": Classifier, "torch": torch, "__name__": "cell"}
    exec(compile(cell, "<cell>", "exec"), scope)
    kind: type[nn.Module] = scope.pop("Cell")
    return kind


@pytest.mark.slow
def test_bare_torch_modules_share_no_recompile_limit() -> None:
    for seed in range(20):
        run(lambda: nn.Sequential(nn.Softsign(), nn.Linear(20, 2)), seed)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_successive_compiled_models_are_cut_and_freed(backend: str) -> None:
    kind = run_cell()  # whose code is not compiled yet

    for seed in range(10):

        def make() -> Any:
            return torch.compile(kind(), backend=backend)

        gone = run(make, seed)
        gc.collect()
        assert gone() is None


def test_workers_stop_computing_for_a_dropped_model() -> None:
    pool = InProcessPool(rows(0))
    model = offload(Classifier(), pool, cut="maximal")
    fold(model, pool, [], epochs=1)
    assert pool.prefixes
    del model
    gc.collect()
    pool.deliver(rows(0)[0])
    assert not pool.prefixes
    assert pool.plan is None


@pytest.mark.slow
def test_model_is_cut_after_its_class_hit_the_recompile_limit() -> None:
    """Dynamo then ran the class's forward in Python, and the model was not cut."""
    kind: Any = run_cell()
    for width in range(2, 4 + torch._dynamo.config.recompile_limit):
        torch.compile(kind(width), backend="eager")(rows(0)[0])
    run(lambda: kind(30), 0)


@pytest.mark.slow
@pytest.mark.parametrize("beyond", [1, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("is_in_place", [True, pytest.param(False, marks=pytest.mark.long)])
def test_compiled_model_is_cut_beyond_the_recompile_limit(is_in_place: bool, beyond: int) -> None:
    """Dynamo counts the captures of a forward for all callers that compile it, so the ninth was not
    cut."""
    kind: Any = run_cell()

    def compiled(width: int) -> Any:
        model = seeded(width, lambda: kind(width))
        if not is_in_place:
            return torch.compile(model, backend="eager")
        model.compile(backend="eager")
        return model

    for width in range(2, 2 + torch._dynamo.config.recompile_limit + beyond):
        expected = fold(compiled(width), rows(0), rows(1))
        train, val = InProcessPool(rows(0)), InProcessPool(rows(1))
        assert fold(offload(compiled(width), train, val, cut="maximal"), train, val) == expected
        assert is_cut(train, val)


@pytest.mark.slow
def test_offloaded_models_do_not_use_up_the_recompile_limit() -> None:
    """Their captures counted towards the program's limit, and the program's model was not
    compiled."""
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        pytest.skip("torch counts all captures of a forward together")
    kind: Any = run_cell()
    kept = []
    for width in range(2, 4 + torch._dynamo.config.recompile_limit):
        pool = InProcessPool(rows(0))
        model = offload(kind(width), pool, cut="maximal")
        fold(model, pool, [], epochs=1)
        kept.append((model, pool))
    graphs = []

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile(kind(30), backend=backend)(rows(0)[0])
    assert len(graphs) == 1
