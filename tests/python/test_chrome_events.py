# SPDX-License-Identifier: Apache-2.0
"""Steps as events of Chrome's trace format: overlapping and crossing events, and clocks that
differ."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
from chrome_trace import check_flows, check_nesting, on_track, track_names

from penstock.loader.watched_steps import MadeBatch, WatchedStep
from penstock.observing.step_trace import Place, StepWindow, TracedStep, events_of, stretches

PLACE = Place(7, 0, "train.py")


class Loader:
    dataset = "rows"


LOADER = Loader()
REF = weakref.ref(LOADER)


def made(sequence: int, *, begun: float, worker: int | None = 0, **times: float) -> MadeBatch:
    """A batch whose stages take a second each, unless given otherwise."""
    collated = times.get("collated", begun + 2)
    arrived = times.get("arrived", collated + 1)
    return MadeBatch(
        epoch=0,
        sequence=sequence,
        worker=worker,
        bytes=1000,
        asked_at=begun,
        begun_at=begun,
        dataset_until=min(begun + 1, collated),
        collate_until=collated,
        made_at=collated,
        arrived_at=arrived,
        staged_at=times.get("staged", arrived),
    )


def step(
    number: int, entered: float, left: float, *batches: MadeBatch, **options: Any
) -> WatchedStep:
    return WatchedStep(REF, 0, number, entered, left, True, batches, 1, 2, **options)


def parts(one: WatchedStep, *later: MadeBatch) -> list[tuple[str, float, float]]:
    return [tuple(stretch) for stretch in stretches(one, later)]


def events(*steps: WatchedStep) -> list[dict[str, Any]]:
    window = StepWindow(100, 0)
    for one in steps:
        window.note(one)
    found = events_of(window.steps(), PLACE)
    check_nesting(found)
    check_flows(found)
    return found


def test_call_is_split_by_the_stages_of_its_batch() -> None:
    one = step(0, 10, 15.5, made(0, begun=11, staged=15))
    assert parts(one) == [
        ("worker_s", 10, 11),
        ("dataset_s", 11, 12),
        ("collate_s", 12, 13),
        ("wire_s", 13, 14),
        ("device_s", 14, 15),
        ("loader_s", 15, 15.5),
    ]


def test_call_with_a_ready_batch_has_only_loader_time() -> None:
    assert parts(step(0, 20, 20.5, made(0, begun=11))) == [("loader_s", 20, 20.5)]


def test_wait_counts_as_ordering_once_a_later_batch_arrived() -> None:
    one = step(0, 10, 14, made(0, begun=10, collated=13))
    assert parts(one, made(1, begun=9, collated=10.5, arrived=11.5))[1:] == [
        ("collate_s", 11, 11.5),
        ("order_s", 11.5, 14),
    ]
    # A batch of the epoch before, or any earlier batch, ends no wait.
    assert parts(one, made(-1, begun=1)) == parts(one)


def test_remaining_wait_is_attributed_to_other_ranks() -> None:
    one = step(0, 10, 16, made(0, begun=10), ranks=(10.0, 15.0))
    assert parts(one)[-2:] == [("ranks_s", 13, 15), ("loader_s", 15, 16)]


def test_call_without_a_batch_counts_as_loader_or_dataset_time() -> None:
    end = WatchedStep(REF, 0, 5, 10, 12, False)
    assert parts(end) == [("loader_s", 10, 12)]
    own = WatchedStep(REF, 0, 5, 10, 12, False, is_own=True)
    assert parts(own) == [("dataset_s", 10, 12)]


def test_concurrent_transfers_have_separate_tracks() -> None:
    found = events(
        step(0, 10, 20, made(0, begun=10, arrived=18), made(1, begun=10, worker=1, arrived=19)),
        step(1, 21, 30, made(2, begun=20, arrived=25)),
    )
    assert len(on_track(found, "wire")) == 2 and len(on_track(found, "wire 2")) == 1


def test_batches_of_a_worker_with_a_skewed_clock_do_not_overlap() -> None:
    found = events(
        step(0, 10, 20, made(0, begun=10, collated=13)),
        step(1, 20, 30, made(1, begun=12.5, collated=15)),
        step(2, 30, 40, made(2, begun=12.6, collated=14)),
    )
    assert [one["ts"] for one in on_track(found, "worker 0") if "batch" in one["name"]] == [
        10e6,
        13e6,
        14e6,
    ]


def test_late_reported_batch_stays_before_its_long_successor() -> None:
    found = events(
        step(0, 10, 17, made(0, begun=12, collated=14)),
        step(1, 18, 50, made(1, begun=11, collated=40)),
    )
    batches = [one for one in on_track(found, "worker 0") if "batch" in one["name"]]
    assert [(one["name"], one["ts"], one["dur"]) for one in batches] == [
        ("batch 0", 12e6, 2e6),
        ("batch 1", 14e6, 26e6),
    ]


def test_loader_read_by_a_dataset_is_nested_in_the_outer_step() -> None:
    other = Loader()
    inner = WatchedStep(weakref.ref(other), 0, 0, 11, 12, True, (), is_own=True)
    outer = step(0, 10, 14, made(0, begun=10, worker=None), is_own=True)
    found = events(inner, outer, step(1, 15, 16))
    slices = on_track(found, "trainer")
    (inside,) = [one for one in slices if one["name"] == "batch 0" and one["ts"] == 11e6]
    assert inside["dur"] == 1e6
    assert [(one["ts"], one["dur"]) for one in slices if one["name"] == "compute"] == [(14e6, 1e6)]


def test_pool_worker_track_is_named_as_in_status() -> None:
    found = events(step(0, 10, 20, made(0, begun=10, worker=0x3F2A << 40)))
    assert "worker 003f2a0000000000" in track_names(found).values()


def test_full_window_takes_no_more_steps() -> None:
    window = StepWindow(2, 1)
    assert [window.note(step(number, number, number + 0.5)) for number in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert [one.seen.number for one in window.steps()] == [1, 2]
    assert isinstance(window.steps()[0], TracedStep) and window.batch_count == 2


@pytest.mark.parametrize("count", [0, 1])
def test_zero_or_one_step_makes_a_valid_trace(count: int) -> None:
    assert len(events(*[step(0, 1, 2)][:count])) >= 1
