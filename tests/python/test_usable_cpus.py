# SPDX-License-Identifier: Apache-2.0
"""The CPUs that a process may use, read from a made-up /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.tuning.process_resources import usable_cpus


@pytest.fixture(autouse=True)
def many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1 = "sys/fs/cgroup/cpu,cpuacct"


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "3200000 100000\n"}, 16),
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
                "sys/fs/cgroup/job/cpu.max": "300000 100000\n",
            },
            3,
        ),
        ({"proc/self/cgroup": "0::/as/the/host/says", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
        (
            {
                "proc/self/cgroup": "9:name=systemd:/\n4:cpu,cpuacct:/docker/1\n0::/\n",
                f"{V1}/cpu.cfs_quota_us": "500000\n",
                f"{V1}/cpu.cfs_period_us": "100000\n",
            },
            5,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/\n",
                f"{V1}/cpu.cfs_quota_us": "-1\n",
                f"{V1}/cpu.cfs_period_us": "100000\n",
            },
            16,
        ),
    ],
)
def test_smallest_cpu_limit_applies(tmp_path: Path, files: dict[str, str], count: int) -> None:
    assert usable_cpus(machine(tmp_path, files)) == count


@pytest.mark.parametrize(
    ("ranks", "count"), [("4", 4), ("3", 5), ("64", 1), ("0", 16), ("", 16), ("x", 16)]
)
def test_ranks_share_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: str, count: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert usable_cpus(tmp_path) == count


def test_current_machine_has_at_least_one_cpu() -> None:
    assert usable_cpus() >= 1
