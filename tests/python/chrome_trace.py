# SPDX-License-Identifier: Apache-2.0
"""Chrome's trace event format, as used by torch.profiler's traces and ours: the rules that a file
must meet so that viewers show all of it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from penstock.observing.trace_file import read_trace

Event = dict[str, Any]
FIELDS = {
    "X": {"name", "ts", "dur", "pid", "tid"},
    "M": {"name", "pid", "args"},
    "C": {"name", "ts", "pid", "args"},
    "i": {"name", "ts"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "t": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid"},
}


def checked(path: Path) -> list[Event]:
    """Return the events of a file, after checking every rule that viewers rely on."""
    trace = read_trace(path)
    json.dumps(trace, allow_nan=False)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert isinstance(trace["baseTimeNanoseconds"], int)
    events: list[Event] = trace["traceEvents"]
    for event in events:
        kind = event["ph"]
        assert FIELDS[kind] <= set(event), event
        assert isinstance(event.get("ts", 0.0), (int, float))
        assert event.get("dur", 0) >= 0, event
        if kind == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values()), event
    check_nesting(events)
    check_flows(events)
    return events


def check_nesting(events: list[Event]) -> None:
    """Check that two slices of a track are nested or disjoint."""
    for track, slices in by_track(events).items():
        ends: list[int] = []
        for begin, end, name in sorted(slices, key=lambda one: (one[0], -one[1])):
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or end <= ends[-1], f"{name} at {begin} crosses its parent on {track}"
            ends.append(end)


def check_flows(events: list[Event]) -> None:
    """Check that every arrow has a start and an end, in this order and inside slices."""
    slices = by_track(events)
    arrows: dict[Any, dict[str, Event]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            arrow = arrows[event["cat"], event["name"], event["id"]]
            assert event["ph"] not in arrow, event
            arrow[event["ph"]] = event
            if event.get("bp") == "e" or event["ph"] == "s":
                at = nanoseconds(event["ts"])
                track = event["pid"], event["tid"]
                assert any(begin <= at < end for begin, end, _ in slices[track]), event
    for arrow in arrows.values():
        assert set(arrow) == {"s", "f"}, arrow
        assert arrow["s"]["ts"] <= arrow["f"]["ts"], arrow


def by_track(events: list[Event]) -> dict[Any, list[tuple[int, int, str]]]:
    tracks: dict[Any, list[tuple[int, int, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin = nanoseconds(event["ts"])
            end = begin + nanoseconds(event["dur"])
            tracks[event["pid"], event["tid"]].append((begin, end, event["name"]))
    return tracks


def nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


def track_names(events: list[Event]) -> dict[int, str]:
    return {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }


def on_track(events: list[Event], name: str) -> list[Event]:
    """Return the slices of the track with this name, by start; outer slices precede inner ones."""
    tids = {tid for tid, known in track_names(events).items() if known == name}
    assert len(tids) == 1, (name, track_names(events))
    found = [event for event in events if event["ph"] == "X" and event["tid"] in tids]
    return sorted(found, key=lambda event: (event["ts"], -event["dur"]))


def seconds_of(events: list[Event], track: str, *names: str) -> float:
    """Return the total duration of the slices with these names."""
    return sum(event["dur"] for event in on_track(events, track) if event["name"] in names) / 1e6
