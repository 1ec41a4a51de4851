# SPDX-License-Identifier: Apache-2.0
"""How much memory is left: on the machine, or in the narrowest cgroup."""

from __future__ import annotations

from pathlib import Path

from penstock.tuning.process_resources import memory_left_bytes

MEMINFO = "MemTotal:       1000 kB\nMemAvailable:    600 kB\n"


def machine(root: Path, groups: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO)
    (root / "proc/self/cgroup").write_text(groups)


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_of_", ".")).write_text(text + "\n")


def test_memory_left_without_limits_is_that_of_the_machine(tmp_path: Path) -> None:
    machine(tmp_path, "0::/job\n")
    group(tmp_path / "sys/fs/cgroup/job", memory_of_max="max", memory_of_current="5")

    assert memory_left_bytes(tmp_path) == 600 * 1024


def test_narrowest_cgroup_counts_without_its_cache(tmp_path: Path) -> None:
    machine(tmp_path, "0::/job/step\n")
    mount = tmp_path / "sys/fs/cgroup"
    group(mount / "job", memory_of_max="300000", memory_of_current="100000")
    group(
        mount / "job/step",
        memory_of_max="100000",
        memory_of_current="90000",
        memory_of_stat="anon 1\ninactive_file 20000",
    )

    assert memory_left_bytes(tmp_path) == 30_000


def test_cgroup_v1_limits_are_read(tmp_path: Path) -> None:
    machine(tmp_path, "4:memory:/job\n")
    folder = tmp_path / "sys/fs/cgroup/memory/job"
    group(folder)
    (folder / "memory.limit_in_bytes").write_text("50000\n")
    (folder / "memory.usage_in_bytes").write_text("20000\n")

    assert memory_left_bytes(tmp_path) == 30_000


def test_missing_system_files_yield_none(tmp_path: Path) -> None:
    assert memory_left_bytes(tmp_path) is None
