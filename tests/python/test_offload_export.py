# SPDX-License-Identifier: Apache-2.0
"""torch.export programs, saved to a file and loaded again, train with a cut as without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cut_models import CASES
from in_process_pool import InProcessPool
from offload_training import batches_of, bits, fresh, train

from penstock.cut.offloading import offload
from penstock.explanation.explanation import explain

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_one_thread")]

CASE = CASES[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    size = torch.export.Dim("size", min=2, max=64)
    program = torch.export.export(
        fresh(CASE.make_model), (CASE.make_batch(0)[0],), dynamic_shapes=({0: size},)
    )
    file = tmp_path / "model.pt2"
    torch.export.save(program, file)
    return file


def test_cut_exported_program_matches_uncut_training(path: Path) -> None:
    expected = train(torch.export.load(path).module(), batches_of(CASE), CASE.loss)
    pool = InProcessPool(batches_of(CASE))
    model = offload(torch.export.load(path).module(), pool, cut="maximal", verify_every=2)
    assert train(model, pool, CASE.loss) == expected
    assert pool.plan is not None and pool.plan.moved and pool.shipped_count
    with pytest.raises(NotImplementedError):
        model.eval()


def test_cut_exported_program_accepts_other_batch_sizes(path: Path) -> None:
    pool = InProcessPool([])
    model = offload(torch.export.load(path).module(), pool, cut="maximal")
    for size in (6, 6, 4, 4, 5):
        twin = torch.export.load(path).module()
        twin.load_state_dict(model.state_dict())
        images = CASE.make_batch(size)[0][:size]
        assert bits(model(pool.deliver(images))) == bits(twin(images))
    assert pool.plan is not None and pool.plan.moved and pool.shipped_count >= 2


def test_exported_program_error_says_to_pass_its_module(path: Path) -> None:
    program = torch.export.load(path)
    with pytest.raises(TypeError, match=r"model = penstock.offload\(program.module\(\), loader\)"):
        offload(program, InProcessPool([]))
    plan = explain(program, CASE.make_batch(0)[0], cut="maximal")
    assert plan.refused is None and plan.moved
