# SPDX-License-Identifier: Apache-2.0
"""The bottleneck of a program, and the advice on it, from numbers alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.tuning.advice import advise, best_first, possible_settings
from penstock.tuning.limiting import Limit, diagnose
from penstock.tuning.observation import LoaderSettings, MadeBatch, Observation

MB = 1e6


def seen(limit: Limit) -> Observation:
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
def test_what_limits_a_program_is_named(limit: Limit) -> None:
    found = diagnose(seen(limit))

    assert found.limit is limit
    assert found.reason.endswith(".")


def test_a_program_that_does_not_wait_is_left_alone() -> None:
    advice = advise(seen(Limit.TRAINER))

    assert all(change.settings is None for change in advice.changes)


def test_a_dataset_that_waits_gets_threads_before_workers() -> None:
    first = advise(seen(Limit.STORAGE)).changes[0]

    assert first.settings is not None
    assert first.settings.fetch_threads > 1
    assert "thread-safe" in first.note


def test_few_workers_become_more() -> None:
    first = advise(seen(Limit.WORKERS)).changes[0]

    assert first.settings is not None
    assert first.settings.num_workers == 2
    assert first.predicted_step_s is not None
    assert first.predicted_step_s < 0.03


def test_workers_that_are_started_anew_stay() -> None:
    first = advise(seen(Limit.WORKER_START)).changes[0]

    assert first.settings is not None
    assert first.settings.persistent_workers


def test_cpus_that_are_busy_are_had_on_other_machines() -> None:
    advice = advise(seen(Limit.DATASET))

    pool = next(change for change in advice.changes if "a pool of" in change.text)
    assert pool.text.startswith("a pool of 8 workers")
    assert pool.predicted_step_s == pytest.approx(0.0105, rel=0.1)


def test_an_order_that_follows_from_the_workers_stays_unless_it_may_change() -> None:
    stream = replace(seen(Limit.WORKERS), order_of_workers=True, takes_threads=False)

    assert {one.num_workers for one in possible_settings(stream)} == {1}
    assert {one.num_workers for one in possible_settings(stream, True)} > {1, 2}
    assert any("seeding='batch'" in change.text for change in advise(stream).changes)


def test_threads_are_left_alone_where_a_dataset_cannot_have_them() -> None:
    stream = replace(seen(Limit.STORAGE), takes_threads=False)

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
def test_whatever_was_seen_there_is_advice_in_words(found: Observation) -> None:
    advice = advise(found)

    assert isinstance(advice.diagnosis.limit, Limit)
    assert str(advice).strip()
    for change in advice.changes:
        assert change.text
        assert change.predicted_step_s is None or change.predicted_step_s >= 0


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(OBSERVATIONS)
def test_no_option_that_changes_the_order_is_tried_unless_it_may_be(found: Observation) -> None:
    for one in possible_settings(found):
        assert one.in_order == found.settings.in_order
        assert one.seeding == found.settings.seeding
        if found.order_of_workers:
            assert one.num_workers == found.settings.num_workers


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(OBSERVATIONS)
def test_batches_ahead_fit_a_part_of_the_memory_or_stay_as_they_are(found: Observation) -> None:
    for one in possible_settings(found):
        if one.prefetch_factor != found.settings.prefetch_factor and found.memory_free_bytes:
            assert one.ahead * found.batch_bytes <= found.memory_free_bytes / 4


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(OBSERVATIONS)
def test_the_first_promises_no_more_than_a_little_less_than_the_best(found: Observation) -> None:
    rated = best_first(found, list(possible_settings(found)))

    assert rated[0][0] <= 1.04 * min(predicted_s for predicted_s, _ in rated) + 1e-12
