# SPDX-License-Identifier: Apache-2.0
"""The bottleneck of a program, and the advice on it, from numbers alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import _C
from penstock.tuning.advice import advise, best_first, possible_settings
from penstock.tuning.limiting import Limit, diagnose
from penstock.tuning.observation import LoaderSettings, MadeBatch, Observation

MB = 1e6


def observation_with(limit: Limit) -> Observation:
    """The measurements of a program with this bottleneck."""
    return replace(EVEN, **CASES[limit])


EVEN = Observation(
    settings=LoaderSettings(num_workers=2, prefetch_factor=2, persistent_workers=True),
    steps=100,
    step_s=0.04,
    compute_s=0.01,
    loader_s=0.0005,
    waiting={"dataset_s": 0.0295},
    dataset_s=0.078,
    collate_s=0.001,
    worker_cpu_s=0.07,
    trainer_cpu_s=0.01,
    cpus=2,
    batch_bytes=MB,
    batch_samples=32,
    delivered=200,
    memory_free_bytes=8 << 30,
)
CASES: dict[Limit, dict[str, Any]] = {
    Limit.TRAINER: {"compute_s": 0.039, "waiting": {"dataset_s": 0.0005}},
    Limit.OFFLOAD: {"compute_s": 0.039, "waiting": {"dataset_s": 0.0005}, "movable_s": 0.02},
    Limit.DATASET: {},
    Limit.STORAGE: {"worker_cpu_s": 0.01},
    Limit.TRANSFORM: {"transform_s": 0.07},
    Limit.COLLATE: {"dataset_s": 0.009, "collate_s": 0.07},
    Limit.PREFIX: {"dataset_s": 0.009, "prefix_s": 0.07},
    Limit.WORKERS: {
        "settings": replace(EVEN.settings, num_workers=1),
        "dataset_s": 0.039,
        "worker_cpu_s": 0.036,
        "trainer_cpu_s": 0.004,
    },
    Limit.PREFETCH: {
        "settings": replace(EVEN.settings, num_workers=1, prefetch_factor=1),
        "compute_s": 0.025,
        "waiting": {"dataset_s": 0.0145},
        "dataset_s": 0.02,
        "worker_cpu_s": 0.019,
        "batches": (MadeBatch(0.13, 0.025), *(7 * [MadeBatch(0.005, 0.025)])),
    },
    Limit.WORKER_START: {
        "settings": replace(EVEN.settings, persistent_workers=False),
        "start_s": 1.0,
        "epoch_steps": 10.0,
    },
    Limit.SLOW_SAMPLES: {
        "batches": (MadeBatch(1.6, 0.01, 1.59), *(19 * [MadeBatch(0.01, 0.01)])),
        "slow_samples": ((1.6, "sample 7"),),
        "dataset_s": 0.089,
        "worker_cpu_s": 0.08,
        "compute_s": 0.01,
    },
    Limit.LINK: {"waiting": {"wire_s": 0.029}, "has_pool": True, "wire_s": 0.03},
    Limit.MEMORY: {"inline_batches": 150},
    Limit.DEVICE: {"waiting": {"device_s": 0.029}},
    Limit.RANKS: {"waiting": {"ranks_s": 0.029}},
    Limit.LOADER: {"compute_s": 0.001, "loader_s": 0.038, "waiting": {"dataset_s": 0.001}},
}


@pytest.mark.parametrize("limit", list(Limit))
def test_diagnosis_names_the_bottleneck(limit: Limit) -> None:
    found = diagnose(observation_with(limit))

    assert found.limit is limit
    assert found.reason.endswith(".")


def test_compute_bound_program_gets_no_settings_change() -> None:
    advice = advise(observation_with(Limit.TRAINER))

    assert all(change.settings is None for change in advice.changes)


def test_storage_bound_dataset_gets_threads_before_workers() -> None:
    first = advise(observation_with(Limit.STORAGE)).changes[0]

    assert first.settings is not None
    assert first.settings.fetch_threads > 1
    assert "thread-safe" in first.note


def test_too_few_workers_lead_to_more_workers() -> None:
    first = advise(observation_with(Limit.WORKERS)).changes[0]

    assert first.settings is not None
    assert first.settings.num_workers == 2
    assert first.predicted_step_s is not None
    assert first.predicted_step_s < 0.03


def test_restarted_workers_become_persistent() -> None:
    first = advise(observation_with(Limit.WORKER_START)).changes[0]

    assert first.settings is not None
    assert first.settings.persistent_workers


def test_busy_cpus_lead_to_pool_advice() -> None:
    advice = advise(observation_with(Limit.DATASET))

    pool = next(change for change in advice.changes if "a pool of" in change.text)
    assert pool.text.startswith("a pool of 8 workers")
    assert pool.predicted_step_s == pytest.approx(0.0105, rel=0.1)


def test_worker_dependent_order_fixes_worker_count_unless_allowed() -> None:
    stream = replace(observation_with(Limit.WORKERS), order_of_workers=True, takes_threads=False)

    assert {one.num_workers for one in possible_settings(stream)} == {1}
    assert {one.num_workers for one in possible_settings(stream, True)} > {1, 2}
    assert any("seeding='batch'" in change.text for change in advise(stream).changes)


def test_dataset_without_thread_support_gets_no_threads() -> None:
    stream = replace(observation_with(Limit.STORAGE), takes_threads=False)

    assert {one.fetch_threads for one in possible_settings(stream)} == {1}


SECONDS = st.floats(0, 2)
OBSERVATIONS = st.builds(
    Observation,
    settings=st.builds(
        LoaderSettings,
        num_workers=st.integers(0, 8),
        fetch_threads=st.integers(1, 64),
        prefetch_factor=st.integers(1, 16),
        persistent_workers=st.booleans(),
        in_order=st.booleans(),
        seeding=st.sampled_from([None, "worker", "batch"]),
    ),
    steps=st.integers(1, 1000),
    step_s=st.floats(1e-6, 10),
    compute_s=SECONDS,
    loader_s=SECONDS,
    waiting=st.dictionaries(
        st.sampled_from(["dataset_s", "wire_s", "worker_s", "order_s", "ranks_s", "device_s"]),
        SECONDS,
    ),
    dataset_s=SECONDS,
    collate_s=SECONDS,
    prefix_s=SECONDS,
    wire_s=SECONDS,
    transform_s=st.none() | SECONDS,
    worker_cpu_s=st.none() | SECONDS,
    worker_delay_s=SECONDS,
    trainer_cpu_s=st.none() | SECONDS,
    cpus=st.integers(1, 12),
    batches=st.lists(st.builds(MadeBatch, SECONDS, SECONDS), max_size=4).map(tuple),
    start_s=SECONDS,
    epoch_steps=st.none() | st.floats(1, 1e6),
    batch_bytes=st.floats(0, 1e10),
    batch_samples=st.integers(1, 512),
    delivered=st.integers(0, 1000),
    inline_batches=st.integers(0, 1000),
    copied_batches=st.integers(0, 1000),
    memory_free_bytes=st.none() | st.integers(0, 1 << 40),
    takes_threads=st.booleans(),
    order_of_workers=st.booleans(),
    has_pool=st.booleans(),
    pool_workers=st.integers(0, 8),
    movable_s=st.none() | SECONDS,
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(OBSERVATIONS)
def test_any_observation_yields_readable_advice(found: Observation) -> None:
    advice = advise(found)

    assert isinstance(advice.diagnosis.limit, Limit)
    assert str(advice).strip()
    for change in advice.changes:
        assert change.text
        assert change.predicted_step_s is None or change.predicted_step_s >= 0


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(OBSERVATIONS)
def test_settings_that_change_the_order_are_not_proposed(found: Observation) -> None:
    for one in possible_settings(found):
        assert one.in_order == found.settings.in_order
        assert one.seeding == found.settings.seeding
        if found.order_of_workers:
            assert one.num_workers == found.settings.num_workers


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(OBSERVATIONS)
def test_changed_prefetch_fits_a_quarter_of_free_memory(found: Observation) -> None:
    for one in possible_settings(found):
        if one.prefetch_factor != found.settings.prefetch_factor and found.memory_free_bytes:
            assert one.ahead * found.batch_bytes <= found.memory_free_bytes / 4


@pytest.mark.parametrize("cpus", [1, 2, 16, 64])
def test_waiting_dataset_gets_at_most_the_workers_of_auto(cpus: int) -> None:
    found = replace(observation_with(Limit.STORAGE), cpus=cpus)

    most = max(one.num_workers for one in possible_settings(found))

    assert most == max(_C.WorkerLimits(cpus).waiting_workers, found.settings.num_workers)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(OBSERVATIONS)
def test_first_choice_is_within_4_percent_of_the_fastest(found: Observation) -> None:
    rated = best_first(found, list(possible_settings(found)))

    assert rated[0][0] <= 1.04 * min(predicted_s for predicted_s, _ in rated) + 1e-12
