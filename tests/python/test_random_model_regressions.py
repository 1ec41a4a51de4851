# SPDX-License-Identifier: Apache-2.0
"""Programs that random models once differed in from eager, reduced: the observed difference, and
the program."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from random_models import Program
from random_training import check

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_one_thread")]

MOVES: dict[str, Program] = {
    "a parameter that was detached got a gradient": Program(
        lines=("v0 = self.gain.detach() * 2.0", "v1 = x * 2.0"), features=("v0", "v1")
    ),
    "a result of a detached parameter came back requiring grad": Program(
        lines=("v0 = self.linear(x).detach()", "v1 = x * 2.0"), features=("v1",), extras=("v0",)
    ),
    "a gradient went through detach_": Program(
        lines=("v0 = self.gain * 2.0", "v0.detach_()", "v1 = x * 2.0"), features=("v0", "v1")
    ),
    "statistics kept with add_(alpha=) were off by a bit": Program(
        lines=(
            "v0 = torch.special.i0e(self.running).pow(2)",
            "self.running.mul_(0.9).add_(v0.mean(), alpha=0.1)",
            "v1 = x * 2.0",
        ),
        features=("v1",),
        calls=2,
    ),
    "addcmul_ and addcdiv_ with a value were off by a bit": Program(
        lines=(
            "v0 = x * 2.0",
            "v1 = self.linear(x)",
            "v2 = v1 * 1.0",
            "v2.addcmul_(v1, v1, value=0.3)",
            "v2.addcdiv_(v1, v1.abs() + 1.0, value=0.3)",
        ),
        features=("v0", "v2"),
    ),
    "filling a returned view of a view left the batch as it was": Program(
        lines=(
            "v0 = image.permute(0, 2, 3, 1)",
            "v1 = v0.broadcast_to(2, *v0.shape)",
            "v2 = x * 2",
        ),
        features=("v2",),
        extras=("v1",),
        overwrites_results=True,
    ),
    "filling one returned view left the other as it was": Program(
        lines=("v0 = x * 2.0", "v1 = v0.view(-1)", "v2 = v1[3:]", "v3 = v0[0]"),
        features=("v0",),
        extras=("v2", "v3"),
        overwrites_results=True,
    ),
    "a conjugate was said to come from workers, which never sent it": Program(
        lines=("v0 = torch.fft.ifft(series)", "v1 = x.exp()"), features=("v1",), extras=("v0",)
    ),
    "nothing moved where a view of a buffer was returned": Program(
        lines=("v0 = self.running.unsqueeze(-1)", "v1 = v0.exp()"),
        features=("v1", "x"),
        extras=("v0",),
    ),
    "nothing moved where new_tensor was called on what moves": Program(
        lines=("v0 = x * 2.0", "v1 = v0.new_tensor([1, 2])", "self.running.add_(v1.mean())"),
        features=("x",),
    ),
    "what was added to itself in place had other bits in a worker": Program(
        lines=("v0, v1 = torch.aminmax(x, dim=-1)", "v1.add_(v1, alpha=0.3)", "v2 = x * 2.0"),
        features=("v1", "v2"),
    ),
    "nothing moved where a masked assignment crosses": Program(
        lines=(
            "v0 = x.nan_to_num()",
            "v0[v0 > 0.5] = 0.125",
            "v1 = v0.cos()",
            "v0[v0 > 0.1] = 1.0",
        ),
        features=("v1",),
        extras=("v0",),
        calls=2,
    ),
    "nothing moved where an inverse of constants is read": Program(
        lines=("v0 = torch.linalg.inv(self.square)",), features=("v0", "x")
    ),
    "nothing moved where a tensor is made of sizes that vary": Program(
        lines=("v0 = torch.tensor(small.shape)",), features=("v0", "x"), rows=(4, 3, 5, 5, 4)
    ),
}

# Dynamo, run on these, gives other bits or raises an error; in the last case torch's fake tensors
# have other strides than eager's.
STAYS: dict[str, Program] = {
    "an index was out of the bounds of a transposed tensor": Program(
        lines=(
            "v0 = x * 2.0",
            "v0.t_()",
            "v1 = v0[:, ids.reshape(-1)[:2] % v0.shape[1]]",
        ),
        features=("v1",),
    ),
    "a size read after unsqueeze_ was the one from before": Program(
        lines=("v0 = x * 2.0", "v0.unsqueeze_(0)", "v1 = v0 / v0.shape[0]"), features=("v1",)
    ),
    "addcdiv with a value was off by a bit": Program(
        lines=("v0 = torch.addcdiv(wide, self.shift, self.shift.abs() + 1.0, value=0.3)",),
        features=("v0",),
    ),
    "planning failed: PenstockError: aten::view failed": Program(
        lines=("v0 = ids.as_strided((2, 2), (1, 2)) % 8", "v1 = self.table[v0].reshape(-1)"),
        features=("v1",),
        extras=("x",),
    ),
}


@pytest.mark.parametrize("program", MOVES.values(), ids=MOVES.keys())
def test_formerly_wrong_program_moves_and_matches_eager(program: Program) -> None:
    outcome = check(program)
    assert outcome.refused is None
    assert outcome.moved and outcome.shipped_count


@pytest.mark.parametrize("program", STAYS.values(), ids=STAYS.keys())
def test_unsupported_program_stays_and_matches_eager(program: Program) -> None:
    outcome = check(program)
    assert outcome.refused is not None
    assert not outcome.moved


def test_data_dependent_size_is_not_asserted() -> None:
    """Runtime assertion failed for expression u0 >= 8"""
    lines = ("v0 = torch.masked_select(x, x > 9.0)", "v1 = torch.zeros(1) < v0[:1]")
    check(Program(lines=lines, features=("x",)))


def test_other_batch_size_logs_no_torch_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """ERROR torch._subclasses.fake_tensor: failed while attempting to run meta for aten.addbmm"""
    line = "v0 = torch.addbmm(x[:, :1], x[None], x.t()[None, :, :1])"
    program = Program(lines=(line,), features=("v0",), rows=(4, 4, 3, 3, 3))
    with caplog.at_level(logging.WARNING, "torch"):
        assert check(program).moved
        assert check(replace(program, lines=("v0 = F.pad(x, (1, 2))",))).moved
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []
