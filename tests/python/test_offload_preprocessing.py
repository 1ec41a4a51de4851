# SPDX-License-Identifier: Apache-2.0
"""A training loop's operations on a batch before it calls the model move with the model's first
operators, and all results are unchanged."""

from __future__ import annotations

import copy
import gc
import pickle
import queue
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from in_process_pool import InProcessPool
from offload_training import bits, fresh, generator_states, warnings_of
from torch import nn

import penstock
from penstock.cut.offloading import detach, offload
from penstock.tracking.lazy_tensor import LazyTensor

pytestmark = [pytest.mark.usefixtures("on_one_thread"), pytest.mark.slow]

STEPS = 7
MEAN = torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)
Loop = Callable[[nn.Module, Any], torch.Tensor]


class Photographs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4 * 6 * 6, 5)
        self.register_buffer("spread", torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = (images / self.spread).tanh()
        return self.head(self.body(images).flatten(1))


class WritesItsInput(Photographs):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images.mul_(0.5)
        return super().forward(images)


class ReturnsItsInput(Photographs):
    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(images), images[:, :1]


class BranchesOnAValue(Photographs):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = images * 2
        if images.mean().item() > 0:
            images = images.sin()
        return super().forward(images)


def photographs(k: int, count: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + k)
    images = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=generator)
    return {"images": images, "labels": torch.randint(0, 5, (count,), generator=generator)}


def loss_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(images), labels)


def scaled(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss_of(model, batch["images"].float() / 255, batch["labels"])


def moved_to_a_device(model: nn.Module, batch: Any) -> torch.Tensor:
    batch = {name: value.to("cpu", non_blocking=True) for name, value in batch.items()}
    return loss_of(model, batch["images"].to(torch.float32).div(255.0), batch["labels"])


def normalised_in_place(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss_of(model, batch["images"].float().div_(255).sub_(MEAN), batch["labels"])


def keeps_and_writes(model: nn.Module, batch: Any) -> torch.Tensor:
    images = batch["images"].float()
    before = images * 2
    first = images[:, 0]
    first.add_(1)
    return loss_of(model, images, batch["labels"]) + before.mean() + first.mean()


def reads(model: nn.Module, batch: Any) -> torch.Tensor:
    images = batch["images"].float() / 255
    float(images.sum())
    images.numpy()[0, 0] = 0.5
    batch["images"].tolist()
    return loss_of(model, images, batch["labels"])


def writes_the_batch_afterwards(model: nn.Module, batch: Any) -> torch.Tensor:
    images = batch["images"].float()
    batch["images"].zero_()
    return loss_of(model, images, batch["labels"]) + batch["images"].float().mean()


def mixes(model: nn.Module, batch: Any) -> torch.Tensor:
    order = torch.randperm(batch["images"].shape[0])
    images = batch["images"].float() / 255
    mixed = 0.3 * images + 0.7 * images[order]
    return loss_of(model, mixed, batch["labels"]) + loss_of(model, mixed, batch["labels"][order])


def draws(model: nn.Module, batch: Any) -> torch.Tensor:
    images = batch["images"].float() / 255
    return loss_of(model, images + torch.randn_like(images) * 0.1, batch["labels"])


def twice(model: nn.Module, batch: Any) -> torch.Tensor:
    images = batch["images"].float() / 255
    return loss_of(model, images, batch["labels"]) + loss_of(
        model, images.flip(-1), batch["labels"]
    )


def halves(model: nn.Module, batch: Any) -> torch.Tensor:
    parts = (batch["images"].float() / 255).chunk(2)
    labels = batch["labels"].chunk(2)
    return sum((loss_of(model, *part) for part in zip(parts, labels, strict=True)), torch.zeros(()))


def wants_its_gradient(model: nn.Module, batch: Any) -> torch.Tensor:
    images = (batch["images"].float() / 255).requires_grad_()
    loss = loss_of(model, images, batch["labels"])
    (gradient,) = torch.autograd.grad(loss, images, create_graph=True)
    return loss + gradient.square().sum()


def under_autocast(model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model, batch["images"].float() / 255, batch["labels"])


def autocast_on_one_side(model: nn.Module, batch: Any) -> torch.Tensor:
    images = batch["images"].float() / 255
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model, images, batch["labels"])


def copies(model: nn.Module, batch: Any) -> torch.Tensor:
    batch = copy.deepcopy(batch)
    images = pickle.loads(pickle.dumps(batch["images"].float()))
    assert type(images) is type(batch["images"]) is torch.Tensor
    return loss_of(model, images / 255, batch["labels"])


def both(model: nn.Module, batch: Any) -> torch.Tensor:
    output, given = model(batch["images"].float() / 255)
    given.mul_(2)
    return F.cross_entropy(output, batch["labels"]) + given.mean()


def train_with_loop(model: nn.Module, batches: Any, loop: Loop) -> list[bytes]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(11)
    trace: list[bytes] = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loop(model, batch)
        loss.backward()
        optimizer.step()
        trace += [bits(loss), *generator_states()]
        trace += [bits(p.grad) for p in model.parameters() if p.grad is not None]
        trace += [bits(value) for value in model.state_dict().values()]
        trace += [bits(value) for value in batch.values()]
    return trace


@pytest.mark.sampled(6)
@pytest.mark.parametrize("cut", ["maximal", "auto", "none"])
@pytest.mark.parametrize(
    ("make_model", "loop", "moves"),
    [
        (Photographs, scaled, ["_to_copy", "div", "truediv", "tanh"]),
        (Photographs, moved_to_a_device, ["_to_copy", "div", "tanh"]),
        (Photographs, normalised_in_place, ["_to_copy", "sub", "tanh"]),
        (Photographs, keeps_and_writes, []),
        (Photographs, reads, []),
        (Photographs, writes_the_batch_afterwards, []),
        (Photographs, mixes, []),
        (Photographs, draws, []),
        (Photographs, twice, ["_to_copy", "flip", "tanh"]),
        (Photographs, halves, ["_to_copy", "tanh"]),
        (Photographs, wants_its_gradient, []),
        (Photographs, under_autocast, ["_to_copy", "tanh"]),
        (Photographs, autocast_on_one_side, []),
        (Photographs, copies, []),
        (WritesItsInput, scaled, []),
        (ReturnsItsInput, both, []),
        (BranchesOnAValue, scaled, ["_to_copy", "mean", "sin"]),
    ],
)
def test_cut_with_loop_preprocessing_matches_eager(
    make_model: Callable[[], nn.Module], loop: Loop, moves: list[str], cut: Any
) -> None:
    sizes = [6, 6, 6, 6, 6, 6, 4] * 2
    batches = [photographs(k, size) for k, size in enumerate(sizes)]
    pool = InProcessPool(batches)
    model = offload(fresh(make_model), pool, cut=cut, verify_every=3)
    trace = train_with_loop(model, pool, loop)
    same = trace == train_with_loop(fresh(make_model), copy.deepcopy(batches), loop)
    assert same
    if cut == "maximal" and moves:
        assert pool.plan is not None
        # The plan is the last call's plan, and a loop may call its model twice a batch.
        moved = set(re.findall(r'group \d+ "(\w+) at ', "".join(pool.prefix_texts)))
        assert not set(moves) - moved
        assert pool.shipped_count
        written = [call.operator for call in pool.plan.moved if call.operator.startswith("_to_")]
        assert all("test_offload_preprocessing.py" in name for name in written)
    detach(model)
    assert not pool.prefixes
    assert type(pool.deliver(batches[0])["images"]) is torch.Tensor


def _operators_of(call: Callable[[], Any]) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {
        event.name + (f" of {event.cpu_parent.name}" if event.name == "aten::copy_" else "")
        for event in profile.events()
    }


def test_loop_preprocessing_no_longer_runs_in_the_trainer() -> None:
    pool = InProcessPool([photographs(k) for k in range(STEPS)])
    model = offload(fresh(Photographs), pool, cut="maximal")
    train_with_loop(model, pool, normalised_in_place)
    batch = pool.deliver(photographs(50))
    ran = _operators_of(lambda: normalised_in_place(model, batch))
    assert "aten::linear" in ran
    # The profiler counts an operator when it is called, and its kernel if there is one below it.
    unwanted = ran & {"aten::copy_ of aten::_to_copy", "aten::div", "aten::tanh"}
    before = _operators_of(lambda: normalised_in_place(detach(model), photographs(51)))
    assert unwanted == set() and "aten::copy_ of aten::_to_copy" in before


def test_batches_stay_plain_without_loop_preprocessing() -> None:
    pool = InProcessPool([{"x": photographs(k)["images"].float()} for k in range(STEPS)])
    model = offload(fresh(Photographs), pool, cut="maximal")
    for batch in pool:
        assert type(batch["x"]) is torch.Tensor
        model(batch["x"])


def test_batches_are_plain_again_when_no_cut_results() -> None:
    pool = InProcessPool([photographs(k) for k in range(30)])
    model = offload(fresh(Photographs), pool, cut="maximal")
    kinds = []
    for batch in pool:
        kinds.append(type(batch["images"]))
        images = batch["images"].float()
        model(images + torch.randn_like(images))
    assert kinds[2] is LazyTensor and kinds[-1] is torch.Tensor
    assert pool.plan is not None and pool.plan.refused is not None
    assert "of the batch" in pool.plan.refused


def test_kept_results_do_not_keep_old_batches_alive() -> None:
    pool = InProcessPool([photographs(k) for k in range(STEPS)])
    model = offload(fresh(Photographs), pool, cut="maximal")
    kept: list[torch.Tensor] = []
    handles = []
    gc.collect()
    gc.disable()  # without a collection, too
    for batch in pool:
        images = batch["images"].float() / 255
        model(images)
        if isinstance(images, LazyTensor):
            assert images._value is not None
            handles.append(images._value._of)
        kept.append(images.mean())
    del batch, images
    pool.deliver(photographs(90)), pool.deliver(photographs(91))
    gc.enable()
    assert sum(handle() is not None for handle in handles) <= 1
    expected = [(photographs(k)["images"].float() / 255).mean() for k in range(STEPS)]
    assert [bits(mean) for mean in kept] == [bits(mean) for mean in expected]


def test_validation_and_other_models_on_one_loader_match_eager() -> None:
    batches = [photographs(k) for k in range(4)]

    def run(model: nn.Module, pool: Any) -> list[bytes]:
        other = fresh(Photographs)
        trace = []
        for _ in range(2):
            model.train()
            trace += train_with_loop(model, pool, scaled)
            model.eval()
            with torch.no_grad():
                trace += [bits(scaled(model, batch)) for batch in pool]
            with torch.inference_mode():
                trace += [bits(scaled(model, batch)) for batch in pool]
            trace += [bits(scaled(other, batch)) for batch in pool]
        return trace

    pool = InProcessPool(batches)
    trace = run(offload(fresh(Photographs), pool, cut="maximal", verify_every=2), pool)
    same = trace == run(fresh(Photographs), batches)
    assert same and pool.shipped_count


def test_compiled_loss_receives_plain_values() -> None:
    @torch.compile(backend="aot_eager")
    def compiled(output: torch.Tensor, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, labels) + images.mean() * 0.1

    def loop(model: nn.Module, batch: Any) -> torch.Tensor:
        images = batch["images"].float() / 255
        loss: torch.Tensor = compiled(model(images), images, batch["labels"])
        return loss

    batches = [photographs(k) for k in range(STEPS)]
    pool = InProcessPool(batches)
    trace = train_with_loop(offload(fresh(Photographs), pool, cut="maximal"), pool, loop)
    same = trace == train_with_loop(fresh(Photographs), copy.deepcopy(batches), loop)
    assert same and pool.shipped_count


class Stored(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: value[0] for name, value in photographs(index, 1).items()}


@pytest.mark.long
def test_worker_processes_match_torch_with_loop_preprocessing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    traces, kinds = [], []
    for loader_class in (torch.utils.data.DataLoader, penstock.DataLoader):
        loader = loader_class(Stored(), batch_size=6, num_workers=2, shuffle=True)
        model = fresh(Photographs)
        if isinstance(loader, penstock.DataLoader):
            model = penstock.offload(model, loader, cut="maximal")
        trace: list[bytes] = []
        for _ in range(2):
            trace += train_with_loop(model, loader, normalised_in_place)
        traces.append(trace)
        kinds.append({type(value) for batch in loader for value in batch.values()})
        detach(model)
    same = traces[0] == traces[1]
    assert same
    assert kinds == [{torch.Tensor}, {LazyTensor}]
    assert not warnings_of(caplog)


def test_batches_prepared_in_another_thread_match_eager() -> None:
    batches = [photographs(k) for k in range(24)]

    def prepared(pool: Any, results: Any) -> None:
        for batch in pool:
            images = batch["images"].float().div_(255)
            results.put((images, images.flip(-1), batch["labels"]))
        results.put(None)

    def run(model: nn.Module, pool: Any) -> list[bytes]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        trace: list[bytes] = []
        results: queue.Queue[Any] = queue.Queue(maxsize=4)
        thread = threading.Thread(target=prepared, args=(pool, results), daemon=True)
        thread.start()
        while (item := results.get(timeout=120)) is not None:
            optimizer.zero_grad()
            loss = loss_of(model, item[0], item[2]) + loss_of(model, item[1], item[2])
            loss.backward()
            optimizer.step()
            trace.append(bits(loss))
        thread.join(60)
        return trace

    pool = InProcessPool(batches)
    model = offload(fresh(Photographs), pool, cut="maximal", verify_every=3)
    assert run(model, pool) == run(fresh(Photographs), copy.deepcopy(batches))
    assert pool.shipped_count
