# SPDX-License-Identifier: Apache-2.0
"""Training with a cut is bit-for-bit training without one: losses, gradients, buffers, random
generator."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cut_models import CASES, Case
from in_process_pool import InProcessPool
from offload_training import (
    STEPS,
    ReadsBetweenWrites,
    TwoGraphs,
    batches_of,
    bits,
    eager_trace,
    fresh,
    train,
)
from torch import nn

from penstock.cut.offloading import detach, offload

pytestmark = pytest.mark.usefixtures("on_one_thread")


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("cut", ["maximal", "auto", "none"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_with_a_cut_is_bit_identical_to_eager(case: Case, cut: Any) -> None:
    pool = InProcessPool(batches_of(case))
    model = offload(fresh(case.make_model), pool, cut=cut, verify_every=2)
    trace = train(model, pool, case.loss)
    assert trace == eager_trace(case)
    assert pool.plan is not None and pool.plan.refused is None
    if cut == "maximal":
        assert bool(pool.plan.moved) == case.moves
        assert bool(pool.shipped_count) == case.moves
    if cut == "none":
        assert not pool.plan.moved and not pool.prefixes
    detach(model)


@pytest.mark.slow
def test_moved_operators_do_not_run_in_the_trainer() -> None:
    case = CASES[0]
    pool = InProcessPool(batches_of(case))
    model = offload(fresh(case.make_model), pool, cut="maximal")
    train(model, pool, case.loss)  # plans, then verifies the first batch with boundary tensors
    batch = pool.deliver(case.make_batch(0))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(batch[0])
    ran = {event.key for event in profile.key_averages()}
    assert "aten::convolution" in ran
    moved = {"aten::_upsample_bilinear2d_aa", "aten::div", "aten::sub"}
    assert ran & moved == set()


@pytest.mark.long
@pytest.mark.slow
def test_mode_and_batch_size_changes_match_eager() -> None:
    case = CASES[5]
    pool = InProcessPool([])
    model, reference = offload(fresh(case.make_model), pool, cut="maximal"), fresh(case.make_model)
    for step, rows in enumerate([10, 10, 7, 7, 10, 3, 3, 1, 1, 10]):
        for is_training in (True, False):
            inputs = pool.deliver(torch.randn(rows, 20))
            model.train(is_training)
            reference.train(is_training)
            torch.manual_seed(step)
            ours = model(inputs)
            torch.manual_seed(step)
            assert bits(ours) == bits(reference(inputs))
    assert pool.plan is not None and pool.plan.moved
    assert pool.shipped_count > 4


@pytest.mark.long
@pytest.mark.slow
def test_hooks_added_before_and_after_offload_fire() -> None:
    calls: list[str] = []
    pool = InProcessPool(batches_of(CASES[0]))
    model = fresh(CASES[0].make_model)
    model.stem.register_forward_hook(lambda *_: calls.append("submodule"))
    offload(model, pool, cut="maximal")
    for batch in pool:
        model(batch[0])
    assert calls == ["submodule"] * STEPS
    model.register_forward_hook(lambda *_: calls.append("late"))
    model.head.register_forward_pre_hook(lambda *_: calls.append("late pre"))
    for batch in pool:
        model(batch[0])
    assert calls.count("submodule") == 2 * STEPS
    assert calls.count("late") == calls.count("late pre") == STEPS
    assert torch._dynamo.config.skip_nnmodule_hook_guards


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in place", "replaced", "data"])
def test_buffer_change_takes_effect_in_next_call(how: str) -> None:
    case = CASES[0]
    pool = InProcessPool([])
    model = offload(fresh(case.make_model), pool, cut="maximal", verify_every=1)
    reference = fresh(case.make_model)
    for step in range(8):
        if step in (3, 5):
            for m in (model, reference):
                if how == "in place":
                    m.mean.add_(0.125)
                elif how == "replaced":
                    m.mean = m.mean + 0.125
                else:
                    m.mean.data.add_(0.125)  # bumps no version: only the comparison can detect it
        batch = pool.deliver(case.make_batch(step))
        assert bits(model(batch[0])) == bits(reference(batch[0]))


@pytest.mark.slow
def test_batches_without_boundary_tensors_run_whole() -> None:
    case = CASES[0]
    pool = InProcessPool(batches_of(case))
    pool.withhold = True
    model = offload(fresh(case.make_model), pool, cut="maximal")
    assert train(model, pool, case.loss) == eager_trace(case)
    assert pool.plan is not None and pool.plan.moved


class ReturnsItsFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(20, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = x * 2.0
        return self.net(features), features, x.view(-1), features.t()


@pytest.mark.slow
def test_writes_between_calls_on_one_batch_match_eager() -> None:
    pool = InProcessPool([])
    model = offload(fresh(ReturnsItsFeatures), pool, cut="maximal")
    reference = fresh(ReturnsItsFeatures)
    for step in range(4):
        raw = torch.randn(10, 20)
        ours, theirs = pool.deliver(raw), raw.clone()
        for round_index in range(4):
            got, expected = model(ours), reference(theirs)
            assert [bits(t) for t in got] == [bits(t) for t in expected]
            for results in (got, expected):
                results[1].mul_(0.5)
                results[2][:3] = float(step + round_index)
            assert [bits(t) for t in got] == [bits(t) for t in expected]
            assert bits(ours) == bits(theirs)


@pytest.mark.slow
def test_tensors_not_from_the_batch_give_eager_results() -> None:
    case = CASES[5]
    pool = InProcessPool([])
    model = offload(fresh(case.make_model).eval(), pool, cut="maximal")
    reference = fresh(case.make_model).eval()
    foreign = torch.randn(10, 20)
    assert bits(model(foreign)) == bits(reference(foreign))
    for _ in range(3):
        a, b = pool.deliver((torch.randn(10, 20), torch.randn(10, 20)))
        other = pool.deliver(torch.randn(10, 20))
        changed = pool.deliver(torch.randn(10, 20)).mul_(2.0)
        part = torch.cat([a[:5], other[:5]])
        for tensor in (a, b, other, changed, part, foreign, a.clone()):
            assert bits(model(tensor)) == bits(reference(tensor))


@pytest.mark.slow
def test_input_that_requires_grad_is_not_cut() -> None:
    case = CASES[5]
    pool = InProcessPool([])
    model = offload(fresh(case.make_model).eval(), pool, cut="maximal")
    reference = fresh(case.make_model).eval()
    for _ in range(3):
        ours = pool.deliver(torch.randn(10, 20)).requires_grad_()
        theirs = ours.detach().clone().requires_grad_()
        model(ours).sum().backward()
        reference(theirs).sum().backward()
        assert ours.grad is not None and theirs.grad is not None
        assert bits(ours.grad) == bits(theirs.grad)
    assert pool.plan is not None and pool.plan.refused is not None
    assert "requires grad" in pool.plan.refused


@pytest.mark.slow
def test_two_models_and_two_inputs_on_one_loader_match_eager() -> None:
    pool = InProcessPool([])
    first = offload(fresh(CASES[5].make_model).eval(), pool, cut="maximal")
    second = offload(fresh(ReadsBetweenWrites), pool, cut="maximal")
    references = fresh(CASES[5].make_model).eval(), fresh(ReadsBetweenWrites)
    for _ in range(4):
        a, b = pool.deliver([torch.randn(10, 20), torch.randn(10, 20)])
        for model, reference in zip((first, second), references, strict=True):
            for tensor in (a, b):
                assert bits(model(tensor)) == bits(reference(tensor))
    assert pool.shipped_count > 6


@pytest.mark.slow
def test_model_error_propagates_and_training_continues() -> None:
    pool = InProcessPool([])
    model = offload(fresh(CASES[2].make_model), pool, cut="maximal")
    good, bad = CASES[2].make_batch(0), CASES[2].make_batch(1)
    bad["category"] = -bad["category"] - 1  # remainder by 5 is fine, by cross and lookup too
    bad["dense"] = bad["dense"][:, :3]
    for _ in range(3):
        batch = pool.deliver(good)
        model(batch["dense"], batch["category"], batch["user"])
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        batch = pool.deliver(bad)
        model(batch["dense"], batch["category"], batch["user"])
    batch = pool.deliver(good)
    assert model(batch["dense"], batch["category"], batch["user"]).shape == (16,)


def test_rejected_offload_leaves_the_model_unchanged() -> None:
    pool = InProcessPool([])
    net = nn.Linear(2, 2)
    for model in (torch.compiler.disable(nn.Linear(2, 2)), nn.Linear(2, 2)):
        if isinstance(model, nn.Linear):
            model._compiled_call_impl = model._call_impl
        assert offload(model, pool) is model
        assert pool.plan is not None and "other than torch.compile" in str(pool.plan.refused)
    no_workers = InProcessPool([])
    no_workers.num_workers = 0
    offload(net, no_workers)
    assert no_workers.plan is not None and "num_workers=0" in str(no_workers.plan.refused)
    with pytest.raises(ValueError, match="cut must be .*, got 'most'"):
        offload(net, pool, cut="most")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="verify_every must be >= 1, got 0"):
        offload(net, pool, verify_every=0)
    assert net._compiled_call_impl is None


@pytest.mark.slow
def test_offload_keeps_model_interface_and_detach_restores_it() -> None:
    case = CASES[0]
    pool = InProcessPool(batches_of(case))
    model = fresh(case.make_model)
    names = set(model.__dict__)
    keys = list(model.state_dict())
    assert offload(model, pool, cut="maximal") is model
    for batch in pool:
        model(batch[0])
    assert list(model.state_dict()) == keys
    twin = copy.deepcopy(model)
    assert twin._compiled_call_impl is None
    batch = pool.deliver(case.make_batch(0))
    assert bits(twin(batch[0])) == bits(model(batch[0]))
    assert pool.prefixes
    assert detach(model) is model
    assert not pool.prefixes and pool.plan is None and model._compiled_call_impl is None
    assert set(model.__dict__) - {"_compiled_call_impl"} == names - {"_compiled_call_impl"}


@pytest.mark.slow
def test_inputs_not_traceable_to_the_batch_give_a_reason() -> None:
    case = CASES[5]
    pool = InProcessPool([])
    model = offload(fresh(case.make_model), pool, cut="maximal")
    for _ in range(20):
        model(pool.deliver(torch.randn(10, 20))[torch.arange(10)])
    assert pool.plan is not None and "given no tensor of the batch" in str(pool.plan.refused)
    for _ in range(3):
        model(pool.deliver(torch.randn(10, 20)))
    assert pool.plan.refused is None and pool.plan.moved


class TakesTwo(TwoGraphs):
    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return self.net(x * 2.0 + noise.abs())


@pytest.mark.slow
def test_operations_on_foreign_tensor_stay_in_trainer() -> None:
    pool = InProcessPool([])
    model, reference = offload(fresh(TakesTwo), pool, cut="maximal"), fresh(TakesTwo)
    for _ in range(4):
        batch, noise = pool.deliver(torch.randn(10, 20)), torch.randn(10, 20)
        assert bits(model(batch, noise)) == bits(reference(batch, noise))
    assert pool.plan is not None
    assert [call.operator.partition(" at")[0] for call in pool.plan.moved] == ["mul"]
    kept = {call.operator.partition(" at")[0]: call.reason for call in pool.plan.kept}
    assert kept["abs"] == "it reads L['noise'], which is not part of the batch"
    assert kept["linear"] == "it reads net.weight, which training changes"


@pytest.mark.slow
def test_batches_with_other_strides_match_eager() -> None:
    pool = InProcessPool([])
    model = offload(fresh(ReadsBetweenWrites), pool, cut="maximal", verify_every=1)
    reference = fresh(ReadsBetweenWrites)
    for rows in (10, 7, 20, 20, 10, 20):
        for batch in (
            torch.randn(rows, 20),
            torch.randn(20, rows).t(),
            torch.randn(rows, 40)[:, ::2],
        ):
            ours = pool.deliver(batch)
            assert bits(model(ours)) == bits(reference(ours))
    assert pool.plan is not None and pool.plan.moved


@pytest.mark.slow
def test_nested_offloaded_models_match_eager() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x * 2.0)

    pool = InProcessPool([])
    inner = offload(fresh(ReadsBetweenWrites), pool, cut="maximal")
    model = offload(Outer(inner), pool, cut="maximal")
    reference = Outer(fresh(ReadsBetweenWrites))
    for _ in range(4):
        batch = pool.deliver(torch.randn(10, 20))
        assert bits(model(batch)) == bits(reference(batch))
        assert bits(inner(batch)) == bits(reference.inner(batch))


class Noisy(TwoGraphs):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x * 2.0 + torch.randn_like(x))


@pytest.mark.slow
def test_moved_random_draws_do_not_advance_trainer_generator() -> None:
    pool = InProcessPool([])
    model = offload(fresh(Noisy), pool, cut="maximal", allow_random=True, verify_every=1)
    model(pool.deliver(torch.randn(10, 20)))
    assert pool.plan is not None
    assert "randn_like" in " ".join(call.operator for call in pool.plan.moved)
    batch = pool.deliver(torch.randn(10, 20))
    before = torch.get_rng_state()
    noisy = model(batch)
    assert torch.equal(torch.get_rng_state(), before)
    assert bits(noisy) == bits(model(batch)) != bits(model(pool.deliver(batch)))


def test_window_recreated_per_batch_counts_as_constant() -> None:
    """The tensor is a different one each time, with the same values."""

    def prepared(batch: torch.Tensor) -> torch.Tensor:
        scaled = batch * torch.hann_window(20)
        return torch.fft.rfft(scaled).transpose_(0, 1).abs().float().t().contiguous()

    model, reference = nn.Linear(11, 3), nn.Linear(11, 3)
    reference.load_state_dict(model.state_dict())
    pool = InProcessPool([])
    offload(model, pool, cut="maximal")
    for seed in range(10):
        batch = torch.randn(4, 20, generator=torch.Generator().manual_seed(seed))
        assert bits(model(prepared(pool.deliver(batch)))) == bits(reference(prepared(batch)))
    assert pool.plan is not None
    moved = [call.operator.partition(" at")[0] for call in pool.plan.moved]
    assert {"mul", "_fft_r2c", "transpose", "abs"} <= set(moved)
