# SPDX-License-Identifier: Apache-2.0
"""Every model of the zoo gives bit-for-bit the same results with a cut as without one.

The lives are compared part by part, so that a failure shows the first difference.
"""

from __future__ import annotations

from typing import Any

import pytest
from cut_models import Case
from zoo_calls import CALLS
from zoo_control_flow import CONTROL_FLOW
from zoo_features import FEATURES
from zoo_models import ZOO
from zoo_runs import differences, is_affected_by_wrong_worker, with_cut, without_cut

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_one_thread")]

# Dynamo takes seconds for each of these, so they live with one cut only.
LONG = {"hf_bert", "hf_llama", "hf_vit", "timm_resnet", "timm_vit", "compiled"}

# For these the plan reports graphs that are not, or hardly, called again: Python numbers are drawn,
# or read from the batch, or counted.
UNUSED = {"anneal", "warm_up", "loop", "v2_augment"}
UNUSED_MARK = pytest.mark.xfail(
    reason="a number of Python that changes makes another graph",
    raises=AssertionError,
    strict=False,
)


def each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@pytest.mark.sampled(7)
@pytest.mark.long("faster_rcnn", "hf_bert", "hf_t5", "hf_vit", "hf_wav2vec2", "retina_net")
@each(ZOO)
def test_maximal_cut_matches_uncut_training(case: Case) -> None:
    skip_if_package_missing(case)
    life, plan, shipped_count = with_cut(case, "maximal")
    assert differences(life, without_cut(case)) == []
    assert bool(plan and plan.moved) == bool(shipped_count) == case.moves
    if plan is not None and plan.refused is not None:
        assert not plan.moved and len(plan.refused) > 10


@pytest.mark.sampled(5)
@pytest.mark.long("faster_rcnn", "hf_bert", "hf_t5", "hf_wav2vec2", "retina_net")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[UNUSED_MARK] * (case.name in UNUSED))
        for case in ZOO
        if case.moves
    ],
)
def test_trainer_uses_the_results_of_workers(case: Case) -> None:
    """Otherwise the lives could be the same just because the whole model ran."""
    skip_if_package_missing(case)
    assert is_affected_by_wrong_worker(case)


@pytest.mark.sampled(5)
@pytest.mark.long("faster_rcnn", "hf_t5", "hf_wav2vec2", "retina_net")
@each([case for case in ZOO if case.name not in LONG])
def test_auto_cut_matches_uncut_training(case: Case) -> None:
    skip_if_package_missing(case)
    life, _, _ = with_cut(case, "auto", is_whole=False)
    assert life.trained == without_cut(case).trained


@pytest.mark.sampled(10)
@each([*CONTROL_FLOW, *CALLS, *FEATURES])
def test_dynamo_without_a_cut_matches_plain_training(case: Case) -> None:
    life, plan, shipped_count = with_cut(case, "none", is_whole=False)
    assert life.trained == without_cut(case).trained
    assert not shipped_count and not (plan and plan.moved)


def skip_if_package_missing(case: Case) -> Any:
    if case.package:
        pytest.importorskip(case.package, reason=f"needs {case.package}; see tests/zoo/README.md")
