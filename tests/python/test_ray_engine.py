# SPDX-License-Identifier: Apache-2.0
"""Ray's behaviour beyond the contract of engines: actors that outlive the adapter, and the requests
to its autoscaler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_pools import RayPool, needs_ray

pytestmark = [pytest.mark.long, pytest.mark.slow, needs_ray]


@pytest.fixture
def on_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayPool]:
    one = RayPool(tmp_path, monkeypatch)
    try:
        yield one
    finally:
        one.close()


def test_new_adapter_finds_surviving_ray_workers(on_ray: RayPool) -> None:
    up = on_ray.up("--min", "2", "--max", "2")
    on_ray.has_workers(2)
    before = on_ray.processes()
    up.process.kill()
    up.wait()
    on_ray.up("--min", "2", "--max", "2")
    on_ray.has_workers(2)
    assert on_ray.processes() == before


def test_ray_autoscaler_gets_worker_requests(on_ray: RayPool) -> None:
    on_ray.up("--min", "6", "--max", "6", "--cpus", "1")
    on_ray.status_when(lambda status: (status["engine"] or {}).get("starting") == 2)
    assert on_ray.requested() == [{"CPU": 1, "dataworker": 1.0}] * 6
    assert on_ray.down().wait() == 0
    assert len(on_ray.requested()) < 6
