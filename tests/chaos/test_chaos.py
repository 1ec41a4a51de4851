# SPDX-License-Identifier: Apache-2.0
"""A short form of `make chaos`: each scenario with a fault or two; in `make test`, two of them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from faults import kill
from outcomes import Outcome, findings, table
from scenarios import JOB_FAULTS, POOL_FAULTS, SCENARIOS, run_scenario
from streams import Delivery, Differences, Stream, compare, percentile, stalls
from trials import count_reported_crashes
from worker_processes import (
    SERVER_NAME,
    all_processes,
    job_processes,
    servers,
    warm_processes,
)

# "mixed" covers all of the omitted scenarios: a pool for each takes long. It starts and ends with
# faults in job processes, so that its first stream, which is map-style, and one of shards meet
# them.
MIXED_COUNT = len(POOL_FAULTS) + len(JOB_FAULTS)
FAULT_COUNTS = dict.fromkeys(SCENARIOS, 1) | {"mixed": MIXED_COUNT, "kill-trainers": 2}
LEFT_OUT = {
    "kill-workers",
    "kill-all-workers",
    "kill-controllers",
    "stop-workers",
    "kill-jobs",
    "stop-jobs",
    "kill-warm-processes",
}
STREAM_OPTIONS = {"sample_count": 320, "epoch_count": 2}
MIXED_OPTIONS = {"sample_count": 640, "epoch_count": 2}
# The values of `make test`: how many faults, and how many workers each `penstock worker` has. The
# first faults of "mixed" are a job process that is killed, one that is stopped, and a warm process
# that is killed, with which its server ends.
SHORTEST = {"kill-jobs": (2, (2,)), "mixed": (3, (1, 1))}


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", SHORTEST)
def test_no_batch_is_lost_in_a_short_trial(name: str, tmp_path: Path, seed: int) -> None:
    fault_count, worker_counts = SHORTEST[name]
    assert_all_batches_delivered(name, tmp_path, seed, fault_count, MIXED_OPTIONS, worker_counts)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SCENARIOS.keys() - LEFT_OUT))
def test_no_batch_is_lost(name: str, tmp_path: Path, seed: int) -> None:
    stream_options = MIXED_OPTIONS if name == "mixed" else STREAM_OPTIONS
    assert_all_batches_delivered(name, tmp_path, seed, FAULT_COUNTS[name], stream_options)


def assert_all_batches_delivered(
    name: str,
    folder: Path,
    seed: int,
    fault_count: int,
    stream_options: Mapping[str, int],
    worker_counts: Sequence[int] = (),
) -> None:
    outcome = run_scenario(
        name,
        folder,
        seed=seed,
        fault_count=fault_count,
        stream_options=stream_options,
        worker_counts=worker_counts,
    )
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    outcome.is_stall_bounded = False  # a few prove little when other tests run
    assert not findings([outcome]), "\n".join([table([outcome]), *findings([outcome])])
    assert outcome.fault_count >= fault_count
    assert outcome.batch_count > 0 or outcome.errors


@pytest.mark.parametrize(
    ("found", "differences"),
    [
        ("abcd", Differences()),
        ("abd", Differences(missing=1)),
        ("abbcd", Differences(doubled=1)),
        ("abdc", Differences(reordered=1)),
        ("abxd", Differences(missing=1, different=1)),
        ("", Differences(missing=4)),
    ],
)
def test_every_difference_is_counted(found: str, differences: Differences) -> None:
    assert compare("abcd", found) == differences


def test_stall_excludes_the_time_of_one_batch() -> None:
    deliveries = [Delivery(place, at, "") for place, at in enumerate((0.0, 1.0, 2.0, 5.0, 6.0))]
    assert stalls(deliveries, [2.5], lambda _: 1.0) == [2.0]
    assert stalls(deliveries, [0.5, 5.5], lambda _: 1.0) == [2.0, 0.0]
    assert stalls(deliveries, [5.1], lambda _: 1.0) == [0.0]
    assert stalls(deliveries, [2.5], float) == [0.0]  # the batch at place 3 takes 3 s


def test_handover_time_includes_rereading_stateless_shards() -> None:
    sizes: Any = {"sample_count": 90, "batch_size": 8, "shard_count": 4, "pause_s": 0.25}
    shards = Stream("shards", 1, **sizes)  # three batches of each
    assert [shards.handover_s(place) for place in (0, 3, 4, 11, 12)] == [2.0, 2.0, 4.0, 6.0, 2.0]
    assert Stream("stateful shards", 1, **sizes).handover_s(11) == 2.0
    assert Stream("map", 1, **sizes).handover_s(11) == 2.0


def test_percentile_is_one_of_the_values() -> None:
    assert percentile([], 99) == 0.0
    assert percentile([3.0, 1.0, 2.0], 99) == 3.0
    assert percentile([float(value) for value in range(100)], 99) == 98.0


def test_job_process_crashes_are_counted_separately() -> None:
    of_job = "penstock worker 0f: a job process of trainer 1e23 was ended by"
    of_warm = "penstock worker 0f: the process that forks job processes was ended by"
    assert count_reported_crashes([]) == (0, 0)
    assert count_reported_crashes(
        [f"{of_job} SIGKILL", f"{of_job} SIGSEGV", f"{of_job} SIGSEGV;"]
    ) == (2, 0)
    lines = [f"{of_job} SIGBUS", f"{of_warm} SIGSEGV", "a process was ended by SIGABRT"]
    assert count_reported_crashes(lines) == (0, 3)


# A server of two workers with the warm process and two processes of jobs, in shells.
WARM = "sleep 1000 & sleep 1000 & echo; wait"
SERVER = f"printf {SERVER_NAME} > /proc/self/comm; sh -c '{WARM}' & wait"
SUPERVISOR = f'sleep 1000 & sh -c "{SERVER}" & wait'


def test_processes_of_server_with_two_workers_are_found() -> None:
    with subprocess.Popen(["sh", "-c", SUPERVISOR], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        supervisor.stdout.readline()
        found = all_processes(supervisor.pid)
        try:
            (server,) = servers(supervisor.pid)
            (warm,) = warm_processes(server)
            jobs = job_processes(server, 2)
            assert len(jobs) == 2 and job_processes(server) == jobs[-1:]
            assert {server, warm, *jobs} < set(found) and len(found) == 5
        finally:
            kill([supervisor.pid, *found])


def test_findings_list_stalls_complaints_and_differences() -> None:
    outcome = Outcome("kill-workers", 7, stalls=[0.1, 2.5], is_stall_bounded=True)
    assert len(findings([outcome])) == 1
    assert "--only kill-workers --seed 7" in findings([outcome])[0]
    outcome.failures.append("left behind: a process")
    outcome.differences = Differences(missing=1)
    assert len(findings([outcome])) == 3
    assert "| kill-workers | 0      | 0       | 1       |" in table([outcome])
