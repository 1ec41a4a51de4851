# SPDX-License-Identifier: Apache-2.0
"""The predicted time of a step with other settings: known pipelines, and general laws."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from penstock.tuning.limiting import predicted_step_s, replayed_step_s
from penstock.tuning.observation import LoaderSettings, MadeBatch, Observation

SECONDS = st.floats(1e-4, 1.0)
BATCHES = st.lists(st.builds(MadeBatch, SECONDS, SECONDS), min_size=1, max_size=20)
SETTINGS = st.builds(
    LoaderSettings,
    num_workers=st.integers(1, 6),
    prefetch_factor=st.integers(1, 6),
    in_order=st.booleans(),
)


def seen_of(making_s: float, compute_s: float, **facts: object) -> Observation:
    settings = LoaderSettings(num_workers=1, prefetch_factor=2)
    given_facts = {
        "settings": settings,
        "steps": 100,
        "step_s": max(making_s, compute_s),
        "compute_s": compute_s,
        "waiting": {"dataset_s": max(0.0, making_s - compute_s)},
        "dataset_s": making_s,
        "cpus": 8,
        "batch_samples": 64,
    }
    return Observation(**{**given_facts, **facts})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("workers", "step_s"), [(1, 0.04), (2, 0.02), (3, 0.04 / 3), (4, 0.01), (8, 0.01)]
)
def test_step_takes_as_long_as_its_slowest_stage(workers: int, step_s: float) -> None:
    settings = LoaderSettings(num_workers=workers, prefetch_factor=2)

    assert replayed_step_s([MadeBatch(0.04, 0.01)], settings, 0.0) == pytest.approx(
        step_s, rel=0.05
    )


def test_stages_are_sequential_without_workers() -> None:
    assert replayed_step_s([MadeBatch(0.04, 0.01)], LoaderSettings(), 0.002) == pytest.approx(0.052)


def test_prefetching_evens_out_uneven_batches() -> None:
    batches = [MadeBatch(0.1, 0.02)] + 9 * [MadeBatch(0.005, 0.02)]

    def step_s(prefetch_factor: int) -> float:
        settings = LoaderSettings(num_workers=1, prefetch_factor=prefetch_factor)
        return replayed_step_s(batches, settings, 0.0)

    assert step_s(1) > 0.025
    assert step_s(16) == pytest.approx(0.02, rel=0.05)


@examples(deadline=None)
@given(BATCHES, SETTINGS)
def test_step_is_at_least_as_long_as_any_stage(
    batches: list[MadeBatch], settings: LoaderSettings
) -> None:
    count = len(batches)
    computing_s = sum(one.compute_s for one in batches) / count
    making_s = sum(one.making_s for one in batches) / count / settings.num_workers
    longest_s = max(max(one.making_s, one.compute_s) for one in batches)
    # A replay ends in the middle of a round, and its workers have batches in hand.
    slack_s = (settings.ahead + count + settings.num_workers) * longest_s / 192

    step_s = replayed_step_s(batches, settings, 0.0)

    assert step_s >= max(computing_s, making_s) - slack_s


@examples(deadline=None)
@given(BATCHES, SETTINGS)
def test_step_is_at_most_as_long_as_sequential_stages(
    batches: list[MadeBatch], settings: LoaderSettings
) -> None:
    longest_s = max(one.making_s for one in batches) + max(one.compute_s for one in batches)

    assert replayed_step_s(batches, settings, 0.0) <= longest_s * (1 + 1e-9)


@examples(deadline=None)
@given(BATCHES, st.integers(1, 6), st.integers(1, 6))
def test_more_prefetching_never_lengthens_a_step(
    batches: list[MadeBatch], workers: int, factor: int
) -> None:
    fewer = LoaderSettings(num_workers=workers, prefetch_factor=factor)
    more = replace(fewer, prefetch_factor=factor + 1)
    count = 256
    longest_s = max(one.making_s + one.compute_s for one in batches)
    slack_s = (more.ahead + len(batches)) * longest_s / (0.75 * count)

    assert replayed_step_s(batches, more, 0.0) <= replayed_step_s(batches, fewer, 0.0) + slack_s


def test_prediction_for_measured_settings_is_the_measurement() -> None:
    seen = seen_of(0.04, 0.01, step_s=0.047)

    assert predicted_step_s(seen, seen.settings) == pytest.approx(0.047)


def test_fetch_threads_divide_waiting_but_not_cpu_time() -> None:
    seen = seen_of(0.1, 0.001, worker_cpu_s=0.02, trainer_cpu_s=0.001)
    threads = replace(seen.settings, fetch_threads=8)

    assert predicted_step_s(seen, threads) == pytest.approx(0.02 + 0.08 / 8, rel=0.05)


def test_busy_workers_share_cpus_with_the_trainer() -> None:
    seen = seen_of(0.04, 0.02, worker_cpu_s=0.04, trainer_cpu_s=0.02, cpus=2)
    many = replace(seen.settings, num_workers=8)

    assert predicted_step_s(seen, many) == pytest.approx((0.04 + 0.02) / 2, rel=0.05)


def test_persistent_workers_remove_epoch_start_time() -> None:
    seen = seen_of(0.01, 0.02, start_s=0.5, epoch_steps=10.0)
    staying = replace(seen.settings, persistent_workers=True)

    assert predicted_step_s(seen, seen.settings) == pytest.approx(0.07)
    assert predicted_step_s(seen, staying) == pytest.approx(0.02, rel=0.05)


def test_offload_moves_time_out_of_the_trainer() -> None:
    seen = seen_of(0.005, 0.03, movable_s=0.02)
    moved = replace(seen.settings, offload=True)

    assert predicted_step_s(seen, moved) == pytest.approx(0.025, rel=0.05)
