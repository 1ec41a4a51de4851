# SPDX-License-Identifier: Apache-2.0
"""The workers' results are compared with the trainer's, and operations that differ return to it."""

from __future__ import annotations

import pytest
import torch
from cut_models import CASES, Case, rows
from in_process_pool import InProcessPool
from offload_training import batches_of, bits, eager_trace, fresh, train, warnings_of
from test_offload_graphs import ThreeGraphsAndABranch
from torch import nn

from penstock.cut.offloading import offload
from penstock.graph.planning import UncheckedBatches

pytestmark = [pytest.mark.usefixtures("on_one_thread"), pytest.mark.slow]


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(20, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net((x * 2.0).cos()) + self.net(x.abs().log1p())


def moved(pool: InProcessPool) -> set[str]:
    assert pool.plan is not None
    return {call.operator.partition(" at ")[0] for call in pool.plan.moved}


def test_only_the_wrong_operator_returns_to_the_trainer(caplog: pytest.LogCaptureFixture) -> None:
    case = Case("", TwoBranches, rows, CASES[5].loss, True)
    pool = InProcessPool(batches_of(case))
    pool.corrupted_operator = "aten::log1p"
    model = offload(fresh(TwoBranches), pool, cut="maximal")
    assert train(model, pool, case.loss) == eager_trace(case)
    assert moved(pool) == {"mul", "cos", "abs"}
    [warning] = warnings_of(caplog)
    assert "result of log1p at test_offload_comparison.py" in warning
    assert "in batch 1 of epoch 0" in warning
    kept = {call.operator.partition(" at ")[0]: call.reason for call in pool.plan.kept}  # type: ignore[union-attr]
    assert kept["log1p"] == "a worker's result of it differed from the trainer's result"


def test_warning_names_the_uncompared_batches(caplog: pytest.LogCaptureFixture) -> None:
    pool = InProcessPool([])
    model, reference = (
        offload(fresh(TwoBranches), pool, cut="maximal", verify_every=10),
        fresh(TwoBranches),
    )
    for step in range(14):
        pool.corrupted_operator = "aten::log1p" if step >= 8 else None
        batch = pool.deliver(torch.randn(10, 20))
        is_right = bits(model(batch)) == bits(reference(batch.clone()))
        assert is_right or 8 <= step < 10  # detected at the tenth batch after the first one
    [warning] = warnings_of(caplog)
    assert "in batch 10 of epoch 0" in warning
    assert "since the last correct one: batch 2 to 9 of epoch 0" in warning


def test_outstanding_batches_are_recomputed_after_a_mismatch() -> None:
    pool = InProcessPool([])
    model, reference = (
        offload(fresh(TwoBranches), pool, cut="maximal", verify_every=3),
        fresh(TwoBranches),
    )
    model(pool.deliver(torch.randn(10, 20)))
    model(pool.deliver(torch.randn(10, 20)))
    pool.corrupted_operator = "aten::log1p"
    early = [pool.deliver(torch.randn(10, 20)) for _ in range(9)]
    right = [bits(model(batch)) == bits(reference(batch.clone())) for batch in early]
    assert right == [False] + [True] * 8
    assert moved(pool) == {"mul", "cos", "abs"}


def test_mismatch_makes_other_cuts_be_compared_before_use() -> None:
    pool = InProcessPool([])
    model, reference = (
        offload(fresh(TwoBranches), pool, cut="maximal", verify_every=4),
        fresh(TwoBranches),
    )
    for is_training in (True, False) * 2:
        model.train(is_training)
        model(pool.deliver(torch.randn(10, 20)))
    pool.corrupted_operator = "aten::log1p"
    reports = [False]
    for step in range(12):
        is_training = step % 3 == 0
        model.train(is_training), reference.train(is_training)
        batch = pool.deliver(torch.randn(10, 20))
        is_right = bits(model(batch)) == bits(reference(batch.clone()))
        assert is_right or not reports[-1]
        reports.append(reports[-1] or moved(pool) == {"mul", "cos", "abs"})
    assert reports[-1]


def test_cut_is_abandoned_if_workers_are_always_wrong(caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[0]
    pool = InProcessPool([case.make_batch(k % 6) for k in range(20)])
    pool.corrupts_results = True
    model = offload(fresh(case.make_model), pool, cut="maximal")
    reference = train(fresh(case.make_model), pool.batches, case.loss)
    assert train(model, pool, case.loss) == reference
    assert pool.plan is not None and not pool.plan.moved
    assert not pool.prefixes
    assert "interpolate at cut_models.py" in warnings_of(caplog)[0]


def test_cut_of_several_graphs_is_refused_after_many_mismatches(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cut.cut_context.MISMATCHES_MAX", 3)
    case = Case("", ThreeGraphsAndABranch, rows, CASES[5].loss, True)
    pool = InProcessPool([case.make_batch(k % 6) for k in range(20)])
    pool.corrupts_results = True
    model = offload(fresh(case.make_model), pool, cut="maximal")
    assert train(model, pool, case.loss) == train(fresh(case.make_model), pool.batches, case.loss)
    assert pool.plan is not None and pool.plan.refused is not None
    assert "earlier calls differed from the trainer's result" in pool.plan.refused
    assert not pool.prefixes
    assert 4 <= len(warnings_of(caplog)) <= 8


def test_first_batch_of_each_worker_is_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = InProcessPool([])
    model = offload(fresh(TwoBranches), pool, cut="maximal", verify_every=10**9)
    reference = fresh(TwoBranches)
    for step in range(15):
        pool.maker = step % 3
        pool.corrupted_operator = "aten::log1p" if pool.maker == 2 and step > 5 else None
        if pool.maker == 2 and step <= 5:
            continue  # it joins later
        batch = pool.deliver(torch.randn(10, 20))
        assert bits(model(batch)) == bits(reference(batch.clone()))
    [warning] = warnings_of(caplog)
    assert "result of log1p at test_offload_comparison.py" in warning


def test_unchecked_batches_are_listed_as_ranges() -> None:
    unchecked = UncheckedBatches()
    assert "No batch" in str(unchecked)
    for batch in [(0, 7), (0, 8), (0, 8), (0, 9), (0, 12), (1, 0), (1, 1)]:
        unchecked.add(*batch)
    text = str(unchecked)
    assert text.endswith("batch 7 to 9 of epoch 0, 12 of epoch 0, 0 to 1 of epoch 1")


def test_memory_of_unchecked_batches_is_bounded() -> None:
    """`verify_every=10**9` kept a tuple for each step."""
    unchecked = UncheckedBatches()
    for epoch in range(200):
        for sequence in range(50):
            unchecked.add(epoch, sequence)
    assert "many before, 0 to 49 of epoch 168" in str(unchecked)
    assert str(unchecked).endswith("0 to 49 of epoch 199")
    unchecked.clear()
    assert "No batch" in str(unchecked)
