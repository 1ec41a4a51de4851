# SPDX-License-Identifier: Apache-2.0
"""Random draws that may move are the batch's draws, in any worker and at any time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cut_models import CASES, rows
from in_process_pool import InProcessPool
from offload_training import bits, fresh, train, warnings_of
from torch import nn
from torch.nn import functional as F

from penstock import DataLoader, explain
from penstock.cut.offloading import offload

pytestmark = [pytest.mark.usefixtures("on_one_thread"), pytest.mark.slow]

LOSS = CASES[5].loss
ROWS = 60


class Noisy(nn.Module):
    """Noise and a mask on its input, which may move, and dropout, which may not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(20, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2.0 + torch.randn_like(x)
        x = x * torch.bernoulli(torch.full_like(x, 0.9))
        return F.dropout(self.net(x), 0.1, self.training)


class NoisyTwice(Noisy):
    """The same draw in each of two graphs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.rand_like(x)
        torch._dynamo.graph_break()
        second = torch.rand_like(x)
        return torch.cat([first, second]) + 0.0 * self.net.weight.sum()


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.samples = [rows(k) for k in range(ROWS // 10)]

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, labels = self.samples[index // 10]
        return inputs[index % 10], labels[index % 10]


def traces(epochs: int = 3, *, cut: str = "auto", **arguments: Any) -> list[list[bytes]]:
    """The state after `epochs` of training, with draws that may move."""
    torch.manual_seed(11)
    loader: DataLoader[Any] = DataLoader(Rows(), batch_size=4, shuffle=True, **arguments)
    model = fresh(Noisy)
    torch.manual_seed(11)
    model = offload(model, loader, cut=cut, allow_random=True, verify_every=4)  # type: ignore[arg-type]
    traced = [train(model, loader, LOSS) for _ in range(epochs)]
    assert {"randn_like", "bernoulli"} <= moved(loader)
    assert loader.stats().boundary_batches
    del loader
    return traced


def moved(loader: Any) -> set[str]:
    assert loader.plan is not None
    return {call.operator.partition(" at ")[0] for call in loader.plan.moved}


@pytest.mark.long
def test_draws_are_independent_of_worker_count() -> None:
    expected = traces(num_workers=1, seeding="batch")
    assert traces(num_workers=2, seeding="batch") == expected
    assert traces(num_workers=3, seeding="batch", prefetch_factor=4) == expected
    assert traces(num_workers=2, seeding="batch", persistent_workers=True) == expected
    assert expected[0] != expected[1]


@pytest.mark.long
def test_draws_are_independent_of_the_cut() -> None:
    assert traces(num_workers=1, cut="maximal") == traces(num_workers=1)


@pytest.mark.long
def test_draws_are_independent_of_epoch_overlap() -> None:
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4}
    early = traces(**options)
    assert early == traces(overlap_epochs=False, **options)
    assert len({loss for epoch in early for loss in epoch[:1]}) == len(early)


def test_draws_after_resume_match_uninterrupted_run() -> None:
    arguments: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "seeding": "batch"}
    model = fresh(Noisy)

    def losses(loader: Any, state: Any, stop: int | None) -> list[bytes]:
        torch.manual_seed(11)
        offloaded = offload(model, loader, allow_random=True)
        made = []
        for batch in loader:
            model.eval()  # without its dropout, which draws from the trainer's generator
            made.append(bits(LOSS(offloaded, batch)))
            if len(made) == stop:
                state.update(loader.state_dict())
                break
        return made

    torch.manual_seed(5)
    state: dict[str, Any] = {}
    first = losses(DataLoader(Rows(), **arguments), state, 6)
    torch.manual_seed(5)
    whole = losses(DataLoader(Rows(), **arguments), {}, None)
    resumed: DataLoader[Any] = DataLoader(Rows(), **arguments)
    resumed.load_state_dict(state)
    assert first + losses(resumed, {}, None) == whole


def test_trainer_draws_the_same_numbers_as_workers() -> None:
    def results(*withheld: int) -> list[bytes]:
        pool = InProcessPool([])
        torch.manual_seed(3)
        model = offload(fresh(Noisy).eval(), pool, allow_random=True)
        made = []
        for step in range(8):
            pool.withhold = step in withheld
            made.append(bits(model(pool.deliver(rows(step)[0]))))
        assert {"randn_like", "bernoulli"} <= moved(pool)
        return made

    assert results() == results(1, 4, 5) == results(*range(8))
    assert len(set(results())) == 8


def test_moved_draws_leave_trainer_generator_unchanged() -> None:
    pool = InProcessPool([])
    torch.manual_seed(3)
    model = offload(fresh(Noisy).eval(), pool, allow_random=True, verify_every=2)
    before = torch.get_rng_state()
    for step in range(6):
        pool.withhold = step == 4
        model(pool.deliver(rows(step)[0]))
        assert torch.equal(torch.get_rng_state(), before)


def test_seed_determines_moved_draws() -> None:
    def result(seed: int) -> bytes:
        pool = InProcessPool([])
        model = fresh(Noisy).eval()
        torch.manual_seed(seed)
        return bits(offload(model, pool, allow_random=True)(pool.deliver(rows(0)[0])))

    assert result(1) == result(1) != result(2)


def test_two_graphs_and_two_models_draw_differently() -> None:
    pool = InProcessPool([])
    torch.manual_seed(3)
    one = offload(fresh(NoisyTwice).eval(), pool, cut="maximal", allow_random=True)
    other = offload(fresh(NoisyTwice).eval(), pool, cut="maximal", allow_random=True)
    for step in range(3):
        batch = pool.deliver(rows(step)[0])
        draws = [bits(half) for model in (one, other) for half in model(batch).chunk(2)]
        assert len(set(draws)) == 4


def test_wrong_draws_of_a_worker_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    pool = InProcessPool([])
    pool.corrupts_results = True
    torch.manual_seed(3)
    model = offload(fresh(Noisy).eval(), pool, cut="maximal", allow_random=True)
    for step in range(4):
        model(pool.deliver(rows(step)[0]))
    assert warnings_of(caplog)


def test_random_draws_move_regardless_of_cost() -> None:
    plan = explain(Noisy(), rows(0)[0], allow_random=True)
    reasons = {call.operator.partition(" at ")[0]: call.reason for call in plan.moved}
    assert "draws random numbers, which allow_random permits to move" in reasons["randn_like"]
    assert {"randn_like", "bernoulli"} <= reasons.keys()
    assert not explain(Noisy(), rows(0)[0], allow_random=True, cut="none").moved
