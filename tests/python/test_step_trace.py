# SPDX-License-Identifier: Apache-2.0
"""`penstock.trace()`: a window of steps as a trace, checked against the ledger and the format."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chrome_trace import checked, nanoseconds, on_track, seconds_of, track_names
from pool_processes import PoolProcesses, pool_of
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset, IterableDataset, default_collate
from worker_gate import WorkerGate

import penstock
from penstock import DataLoader
from penstock.loader.step_times import StepTimes
from penstock.observing.step_trace import FIRST_TRACK
from penstock.observing.trace_file import read_trace

pytestmark = pytest.mark.slow


class Rows(Dataset[torch.Tensor]):
    """One of them, `late`, waits at a gate, if there is one."""

    def __init__(self, count: int, gate: WorkerGate | None = None, late: int = 0) -> None:
        self.count, self.gate, self.late = count, gate, late

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.gate is not None and index == self.late:
            self.gate.pass_through()
        return torch.full((1000,), float(index))


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(12):
            yield torch.full((3,), float(number))


def train(loader: Any) -> int:
    return sum(1 for _ in loader)


def is_alike(traced_s: float, counted_s: float, times: StepTimes) -> bool:
    """Of a part of the steps by trace and by ledger: the ends of a wait may count as loader time on
    one of the two sides."""
    return abs(traced_s - counted_s) <= times.loader_s


def names_on(events: list[dict[str, Any]], track: str) -> set[str]:
    return {event["name"] for event in on_track(events, track)}


def test_trace_tracks_match_the_step_times(tmp_path: Path) -> None:
    # If the trainer is late to notice a batch, the slice of the next one is too short, if the
    # worker makes that one meanwhile. It is asked for one batch at a time, and does not.
    loader = DataLoader(
        Rows(48), batch_size=4, num_workers=2, prefetch_factor=1, collate_fn=default_collate
    )
    with penstock.trace(tmp_path / "trace.json") as trace:
        assert train(loader) == 12
    assert trace.path == tmp_path / "trace.json" and trace.step_count == 12
    events = checked(trace.path)
    times, stats = loader.stats().ledger, loader.stats()
    waits = {
        "wait for the dataset": times.dataset_s,
        "wait for collating": times.collate_s,
        "wait for a free worker": times.worker_s,
        "wait for the batch whose turn it is": times.order_s,
    }
    for name, seconds in waits.items():
        assert is_alike(seconds_of(events, "trainer", name), seconds, times), name
    # The time before the first call belongs to no step.
    assert 0 < seconds_of(events, "trainer", "compute") <= times.compute_s
    # Batches of workers on this machine are in shared memory as soon as they are made.
    assert set(track_names(events).values()) == {"trainer", "worker 0", "worker 1"}
    for part, seconds in (("dataset", stats.dataset_s), ("collate", stats.collate_s)):
        of_workers = sum(seconds_of(events, f"worker {n}", part) for n in (0, 1))
        assert of_workers == pytest.approx(seconds)
    arrows = [event for event in events if event["ph"] == "s"]
    assert len(arrows) == 12
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"batches", "throughput"}
    assert all(event.get("tid", 0) == 0 or event["tid"] >= FIRST_TRACK for event in events)


def test_parts_add_up_to_each_batch_event(tmp_path: Path) -> None:
    loader = DataLoader(Rows(24), batch_size=4, num_workers=1)
    with penstock.trace(tmp_path / "trace.json"):
        train(loader)
    events = on_track(checked(tmp_path / "trace.json"), "trainer")
    calls = [event for event in events if event["name"].startswith("batch ")]
    assert [event["name"] for event in calls] == [f"batch {number}" for number in range(6)]
    for call in calls:
        begin, length = nanoseconds(call["ts"]), nanoseconds(call["dur"])
        parts = [
            nanoseconds(one["dur"])
            for one in events
            if begin <= nanoseconds(one["ts"]) < begin + length and one is not call
        ]
        assert sum(parts) == length


def test_wait_for_overtaken_batch_is_traced_as_order(tmp_path: Path) -> None:
    gate = WorkerGate()
    loader = DataLoader(Rows(32, gate, late=8), batch_size=4, num_workers=2)
    with contextlib.closing(gate), gate.opened_once_waiting(loader, given=2, ready=1):
        with penstock.trace(tmp_path / "trace.json"):
            train(loader)
    events = checked(tmp_path / "trace.json")
    order_s = seconds_of(events, "trainer", "wait for the batch whose turn it is")
    times = loader.stats().ledger
    assert times.order_s > 0 and is_alike(order_s, times.order_s, times)


def test_in_process_batches_are_on_the_trainer_track(tmp_path: Path) -> None:
    loader = DataLoader(Rows(12), batch_size=4, collate_fn=default_collate)
    with penstock.trace(tmp_path / "trace.json"):
        train(loader)
    events = checked(tmp_path / "trace.json")
    times = loader.stats().ledger
    for name, seconds in (("dataset", times.dataset_s), ("collate", times.collate_s)):
        assert seconds > 0 and is_alike(seconds_of(events, "trainer", name), seconds, times)
    assert set(track_names(events).values()) == {"trainer"}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterable_dataset_is_traced(tmp_path: Path, num_workers: int) -> None:
    loader = DataLoader(Stream(), batch_size=4, num_workers=num_workers)
    with penstock.trace(tmp_path / "trace.json"):
        count = train(loader)
    events = checked(tmp_path / "trace.json")
    calls = [one for one in on_track(events, "trainer") if one["name"].startswith("batch ")]
    assert len(calls) == count
    assert "end of the epoch" in names_on(events, "trainer")


def test_trace_skips_steps_and_is_written_when_full(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    loader = DataLoader(Rows(400), batch_size=4, num_workers=2)
    batches = iter(loader)
    for _ in range(10):  # its workers run already
        next(batches)
    with penstock.trace(path, steps=20, skip=5) as trace:
        for number in range(26):
            assert path.exists() == (number > 24), number
            next(batches)
    events = checked(path)
    calls = [one for one in on_track(events, "trainer") if one["name"].startswith("batch ")]
    assert [one["name"] for one in calls] == [f"batch {number}" for number in range(15, 35)]
    assert trace.step_count == 20


def test_several_loaders_have_separate_tracks(tmp_path: Path) -> None:
    one = DataLoader(Rows(8), batch_size=4, num_workers=1)
    other = DataLoader(Stream(), batch_size=4, num_workers=1)
    with penstock.trace(tmp_path / "trace.json"):
        train(one)
        train(other)
        train(one)
    names = set(track_names(checked(tmp_path / "trace.json")).values())
    assert {"trainer", "loader 1 (Rows): worker 0", "loader 2 (Stream): worker 0"} <= names
    assert not any("loader 3" in name for name in names)


def test_program_error_still_writes_the_trace(tmp_path: Path) -> None:
    loader = DataLoader(Rows(80), batch_size=4, num_workers=1)
    with pytest.raises(KeyboardInterrupt), penstock.trace(tmp_path / "trace.json.gz") as trace:
        for number, _ in enumerate(loader):
            if number == 3:
                raise KeyboardInterrupt
    assert trace.step_count == 4
    assert (tmp_path / "trace.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert len(on_track(checked(tmp_path / "trace.json.gz"), "worker 0")) >= 8
    assert os.listdir(tmp_path) == ["trace.json.gz"]


def test_empty_trace_is_valid(tmp_path: Path) -> None:
    with penstock.trace(tmp_path / "trace.json") as trace:
        pass
    assert trace.step_count == 0
    assert [event["name"] for event in checked(tmp_path / "trace.json")] == ["process_name"]


def test_forked_child_does_not_write_its_parents_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with penstock.trace(path):
        pid = os.fork()
        if pid == 0:
            try:
                with penstock.trace(tmp_path / "of_child.json"):
                    train(DataLoader(Rows(4), batch_size=2))
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert not path.exists()
    assert len(checked(tmp_path / "of_child.json")) > 1


def test_each_rank_writes_its_own_trace_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        with penstock.trace(tmp_path / "trace.json") as trace:
            train(DataLoader(Rows(8), batch_size=4, num_workers=1))
        assert trace.path == tmp_path / f"trace.rank{rank}.json"
    count = penstock.merge_traces(
        [tmp_path / "trace.rank0.json", tmp_path / "trace.rank1.json"], tmp_path / "job.json"
    )
    events = checked(tmp_path / "job.json")
    assert len(events) == count
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert sorted(name.rpartition(", ")[2] for name in names.values()) == ["rank 0", "rank 1"]


def test_torch_and_penstock_traces_share_a_clock(tmp_path: Path) -> None:
    loader = DataLoader(Rows(40), batch_size=4, num_workers=1)
    activities = [ProfilerActivity.CPU]
    with penstock.trace(tmp_path / "ours.json"), profile(activities=activities) as profiler:
        train(loader)
    profiler.export_chrome_trace(str(tmp_path / "torchs.json"))
    checked(tmp_path / "torchs.json")  # torch's traces follow the same rules
    penstock.merge_traces([tmp_path / "ours.json", tmp_path / "torchs.json"], tmp_path / "b.json")
    events = checked(tmp_path / "b.json")
    ours = [one for one in on_track(events, "trainer") if one["name"].startswith("batch ")]
    torchs = {
        one["name"].removeprefix("penstock: "): one
        for one in events
        if one["name"].startswith("penstock: batch ") and one["ph"] == "X"
    }
    for one in ours:
        twin = torchs[one["name"]]
        assert one["pid"] == twin["pid"] == os.getpid()
        # Ours is timed inside torch's, whose clock is different, converted, and slightly off.
        assert twin["ts"] <= one["ts"] + 1000
        assert twin["ts"] + twin["dur"] >= one["ts"] + one["dur"] - 1000
    assert len(ours) == 10


def test_merging_invalid_or_unclocked_traces_raises(tmp_path: Path) -> None:
    with penstock.trace(tmp_path / "ours.json"):
        pass
    (tmp_path / "old.json").write_text('[{"ph": "X", "ts": 1, "dur": 1, "name": "x"}]')
    (tmp_path / "cut.json").write_text('{"traceEvents": [')
    (tmp_path / "other.json").write_text('{"rows": 3}')
    for name, words in (
        ("old.json", "clock is unknown"),
        ("cut.json", "is truncated"),
        ("other.json", "no list of traceEvents"),
    ):
        with pytest.raises(ValueError, match=words):
            penstock.merge_traces([tmp_path / "ours.json", tmp_path / name], tmp_path / "b.json")
    with pytest.raises(ValueError, match="requires at least one trace"):
        penstock.merge_traces([], tmp_path / "b.json")
    assert not (tmp_path / "b.json").exists()


def test_invalid_trace_arguments_raise_immediately(tmp_path: Path) -> None:
    for options, words in (
        ({"steps": 0}, "steps must be an integer from 1 to 1000000, got 0"),
        ({"steps": 2.5}, "steps must be an integer from 1 to 1000000, got 2.5"),
        ({"skip": -1}, "skip must be an integer from 0 to 1000000, got -1"),
    ):
        with pytest.raises(ValueError, match=words):
            penstock.trace(tmp_path / "trace.json", **options)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="the folder .*/no does not exist"):
        penstock.trace(tmp_path / "no" / "trace.json").__enter__()
    with pytest.raises(IsADirectoryError, match="is a folder"):
        penstock.trace(tmp_path).__enter__()


def test_unwritable_trace_warns_and_training_continues(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    loader = DataLoader(Rows(12), batch_size=4)
    with penstock.trace(folder / "trace.json", steps=2) as trace:
        folder.rmdir()
        with pytest.warns(UserWarning, match="the trace of 2 steps was not written"):
            assert train(loader) == 3
    assert trace.path is None


def test_steps_are_not_recorded_without_a_trace(tmp_path: Path) -> None:
    loader = DataLoader(Rows(400), batch_size=4, num_workers=1)
    batches = iter(loader)
    next(batches)
    assert batches.step_records() == []  # type: ignore[attr-defined]


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


@pytest.mark.long
def test_pool_worker_tracks_have_worker_ids(tmp_path: Path, pool: PoolProcesses) -> None:
    pool.start_worker()
    loader = DataLoader(Rows(80), batch_size=4, pool=pool.endpoint)
    with penstock.trace(tmp_path / "pool.json"):
        train(loader)
    events = checked(tmp_path / "pool.json")
    (identity,) = loader.stats().workers
    assert f"worker {identity:016x}" in track_names(events).values()
    assert len(on_track(events, "wire")) > 0
    assert read_trace(tmp_path / "pool.json")["penstock"]["steps"] == 20
