# SPDX-License-Identifier: Apache-2.0
"""penstock status, for people. It showed hexadecimal ids, "2 of 4096" workers and totals without
rates; jobs that had ended stayed, and there was no reason why a worker could not run a job."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_processes import SECONDS_MAX, PoolProcesses, pool_of
from torch.utils.data import TensorDataset

from penstock import DataLoader
from penstock.pool.pool_status import PoolStatus, status_text

SOFTWARE = "penstock 0.1.0, torch 2.11.0, Python 3.11.7"
CONTROLLER = {
    "id": "22ab000000000001",
    "endpoint": "tcp://10.0.0.1:5",
    "is_settled": True,
    "policy_trouble": None,
    "offences": [],
    "key_trouble": None,
}


def worker(number: int, **others: Any) -> dict[str, Any]:
    return {
        "id": f"00a{number}000000000001",
        "endpoint": f"tcp://10.0.0.2:400{number}",
        "about": f"node{number}, process 17, {SOFTWARE}",
        "machine": None,
        "trainer": None,
        "assigned_to": None,
        "is_withdrawn": False,
        "is_draining": False,
        "stuck_s": None,
        "unfit_for": [],
        "unfit_reason": None,
        "host_load": None,
        "kept_bytes": 0,
        "kept_answers": 0,
        "log": "",
        "since_report_s": 0.25,
        **others,
    }


def trainer(number: int, **others: Any) -> dict[str, Any]:
    return {
        "id": f"11a{number}000000000001",
        "job": "train.py: Images",
        "user": None,
        "group": None,
        "rank": 0,
        "world_size": 1,
        "about": f"gpu{number}, process 4, torch 2.11.0",
        "workers": 2,
        "workers_max": 4096,
        "since_report_s": 0.1,
        "idle_s": 0.0,
        "batches_per_s": 12.34,
        "waited_share": 0.256,
        "workers_wanted": 12,
        "limited_by": "unknown",
        "reason": "no measurements yet",
        "changes": 0,
        "step_s": None,
        "starved_s": None,
        "worker_s": None,
        "worker_cpu_share": None,
        "batch_bytes": None,
        "link_bytes_per_s": None,
        "is_paused": False,
        "queue": {
            "ready_batches": 3,
            "asked_batches": 4,
            "bytes_in_flight": 2_500_000,
            "waited_s": 1.25,
            "delivered_batches": 12345,
        },
        **others,
    }


def shown(
    workers: list[dict[str, Any]],
    trainers: list[dict[str, Any]],
    with_idle: bool = False,
    **controller: Any,
) -> str:
    engine = controller.pop("engine", None)
    fields = {
        "controller": {**CONTROLLER, **controller},
        "engine": engine,
        "workers": workers,
        "trainers": trainers,
    }
    return status_text(PoolStatus(fields), with_idle=with_idle)


FIRST = "11a1000000000001"
SECOND = "11a2000000000001"


def test_status_shows_rejected_claims_with_key_and_count() -> None:
    claim = (
        "a process with the key of the user ann claimed to be trainer 11a1000000000001, but is not"
    )
    offence = {"by": "the user ann", "text": claim, "count": 1, "since_s": 4.2}
    often = {**offence, "count": 3}
    for offences, line in (([offence], "once, last 4 s"), ([often], "3 times, last 4 s")):
        assert f"\nrefused {line} ago: {claim}" in shown([worker(1)], [], offences=offences)


def test_status_reports_unreadable_keys() -> None:
    trouble = "the keys in /k cannot be used: its mode is 0755"
    assert f"uses the previous ones: {trouble}" in shown([worker(1)], [], key_trouble=trouble)


def test_status_has_a_worker_table_and_a_job_table() -> None:
    text = shown(
        [
            worker(1, trainer=FIRST),
            worker(2, assigned_to=FIRST, is_withdrawn=True),
            worker(3, trainer=SECOND, is_draining=True),
            worker(4),
        ],
        [trainer(1), trainer(2, workers=1, workers_max=3)],
    )
    assert (
        text
        == """\
controller 22ab0000 at tcp://10.0.0.1:5

worker    id        address              works for
node1/17  00a10000  tcp://10.0.0.2:4001  train.py: Images of gpu1/4
node2/17  00a20000  tcp://10.0.0.2:4002  train.py: Images of gpu1/4; moving to another job
node3/17  00a30000  tcp://10.0.0.2:4003  train.py: Images of gpu2/4; draining
node4/17  00a40000  tcp://10.0.0.2:4004  no job

job               trainer  id        workers  batches/s  waits  delivered  ready  asked  in flight
train.py: Images  gpu1/4   11a10000  2        12.3       26%    12,345     3      4      2.5 MB
train.py: Images  gpu2/4   11a20000  1 of 3   12.3       26%    12,345     3      4      2.5 MB"""
    )


def test_status_shows_machine_of_worker_key() -> None:
    lines = shown([worker(1, machine="beta"), worker(2)], []).splitlines()
    assert lines[3:5] == [
        "node1/17 (beta)  00a10000  tcp://10.0.0.2:4001  no job",
        "node2/17         00a20000  tcp://10.0.0.2:4002  no job",
    ]


def test_empty_pool_status_shows_no_workers_and_no_jobs() -> None:
    text = shown([], [], is_settled=False)
    assert "22ab0000 at tcp://10.0.0.1:5; starting, no workers are assigned yet" in text
    assert "\nno workers\n" in text and text.endswith("\nno jobs")


def test_idle_job_is_shown_as_idle_and_later_hidden() -> None:
    idle = trainer(1, workers=0, workers_max=0, idle_s=8.2)
    assert re.search("gpu1/4 +11a10000 +- +idle for 8 s +12,345$", shown([], [idle]), re.MULTILINE)
    dead = trainer(2, workers=0, workers_max=0, idle_s=61.0)
    text = shown([], [idle, dead])
    assert "gpu1/4" in text and "gpu2/4" not in text
    assert "1 job that has been idle for over 60 s: see --all" in text
    assert "no jobs" not in shown([], [dead])
    text = shown([], [idle, dead], with_idle=True)
    assert "gpu2/4" in text and "--all" not in text


def test_unknown_rates_are_shown_as_dashes() -> None:
    text = shown([], [trainer(1, batches_per_s=None, waited_share=None)])
    assert re.search("11a10000 +2 +- +- +12,345", text)


def test_status_shows_why_a_worker_cannot_run_a_job() -> None:
    gone = "11a9000000000001"
    unfit = worker(1, unfit_for=[gone, FIRST], unfit_reason="it needs the module 'images'")
    waiting = trainer(1, workers=0)
    text = shown([unfit], [waiting])
    assert text.splitlines()[-2:] == [
        "train.py: Images of gpu1/4 has no worker: no worker of the pool can run it",
        "node1/17 cannot run train.py: Images of gpu1/4: it needs the module 'images'",
    ]
    assert "cannot run" not in shown([unfit], [])
    # The reason is the last one's: the others' reasons are not shown.
    unfit["unfit_for"] = [FIRST, gone]
    assert shown([unfit], [waiting]).endswith("cannot run train.py: Images of gpu1/4")


@pytest.mark.parametrize(
    ("workers", "settled", "why"),
    [
        ([], True, "the pool has no workers"),
        ([worker(1, is_draining=True)], True, "the pool has no workers"),
        ([worker(1, stuck_s=4.2)], True, "all are stuck at batches no longer needed, and are"),
        ([worker(1)], False, "the controller assigns no workers yet"),
        ([worker(1, trainer=SECOND)], True, "the workers serve other jobs, or are about to start"),
    ],
)
def test_status_shows_why_a_job_has_no_worker(
    workers: list[dict[str, Any]], settled: bool, why: str
) -> None:
    text = shown(workers, [trainer(1, workers=0), trainer(2)], is_settled=settled)
    assert f"\ntrain.py: Images of gpu1/4 has no worker: {why}" in text


def test_status_shows_versions_only_if_they_differ() -> None:
    same = [worker(1), worker(2), worker(3), worker(4)]
    assert "torch" not in shown(same, [])
    other = worker(5, about="node5, process 17, penstock 0.0.9, torch 2.10.0")
    assert shown([*same, other], []).splitlines()[-2:] == [
        "node5/17 runs penstock 0.0.9, torch 2.10.0",
        f"node1/17, node2/17, node3/17 and 1 more run {SOFTWARE}",
    ]


def test_control_characters_from_peers_are_escaped() -> None:
    """Text in other alphabets is shown as it is."""
    job = "Bücher\x1b[2J\nx"
    text = shown(
        [worker(1, trainer=FIRST, about="\x1b[31m", unfit_for=[FIRST], unfit_reason="\x1b[2J")],
        [trainer(1, job=job, workers=0)],
    )
    assert text.count("Bücher\\x1b[2J\\nx of gpu1/4") == 3
    assert "\x1b" not in text
    assert "\n00a10000  00a10000  tcp" in text  # the name of a user without one


def test_worker_is_found_by_name_or_id_prefix() -> None:
    status = PoolStatus({"workers": [worker(1), worker(2)]})
    for wanted in ("00A1", "node1/17", "00a1000000000001"):
        assert status.find_worker(wanted)["id"] == "00a1000000000001"
    for wanted, words in [
        ("00a", r"2 workers have .* workers: node1/17 \(00a1000000000001\), node2/17"),
        ("node1", "no worker has the name or id prefix 'node1'"),
        ("", "no worker has"),
    ]:
        with pytest.raises(ValueError, match=words):
            status.find_worker(wanted)


ENGINE = {
    "name": "slurm",
    "wanted": 6,
    "reason": "the jobs can use 6",
    "running": 4,
    "starting": 1,
    "stopping": 2,
    "refusals": 0,
    "refusal": None,
    "trouble": None,
    "workers_min": 0,
    "workers_max": 8,
    "idle_s": 60.0,
    "price_per_hour": None,
    "budget": None,
    "spent": None,
    "is_ending": False,
    "since_report_s": 0.5,
}


def test_status_shows_engine_counts_and_reason() -> None:
    text = shown([], [], engine=ENGINE)
    assert (
        "engine slurm: 4 running, 1 starting, 2 stopping, 6 wanted (0 to 8); the jobs can use 6"
        in text
    )
    text = shown([], [], engine={**ENGINE, "spent": 1.5, "budget": 3.0, "starting": 0})
    assert "4 running, 2 stopping, 6 wanted (0 to 8); 1.50 of 3 spent; the jobs" in text
    text = shown([], [], engine={**ENGINE, "refusals": 3, "refusal": "no node", "trouble": "hangs"})
    assert "engine slurm has refused 3 times, last: no node" in text
    assert "engine slurm: hangs" in text
    text = shown([], [], engine={**ENGINE, "since_report_s": 12.0})
    assert "engine slurm: its adapter has not reported for 12 s" in text
    assert "engine" not in shown([], [])


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


def status_when(pool: PoolProcesses, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + SECONDS_MAX
    while not is_so(status := pool.status()):
        assert time.monotonic() < deadline, status
    return status


@pytest.mark.long
@pytest.mark.slow
def test_controller_measures_rates_and_idle_time_of_jobs(pool: PoolProcesses) -> None:
    pool.start_worker()
    loader = DataLoader(TensorDataset(torch.zeros(8)), pool=pool.endpoint)
    batches = iter(loader)
    next(batches)
    status = status_when(pool, lambda status: status["trainers"][0]["batches_per_s"] is not None)
    (seen,) = status["trainers"]
    assert seen["batches_per_s"] >= 0 and 0 <= seen["waited_share"] <= 1
    assert len(list(batches)) == 7
    status_when(pool, lambda status: status["trainers"][0]["idle_s"] > 0)


@pytest.mark.long
@pytest.mark.slow
def test_controller_has_the_reason_of_a_job_rejection(pool: PoolProcesses) -> None:
    pool.start_worker(environment={"PENSTOCK_JOB_BYTES": "100"})
    loader = DataLoader(TensorDataset(torch.zeros(8)), pool=pool.endpoint)
    with pytest.raises(Exception, match="PENSTOCK_JOB_BYTES"), pytest.warns(match="JOB_BYTES"):
        next(iter(loader))
    status = status_when(pool, lambda status: bool(status["workers"][0]["unfit_for"]))
    assert "PENSTOCK_JOB_BYTES" in status["workers"][0]["unfit_reason"]
