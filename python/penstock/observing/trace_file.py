# SPDX-License-Identifier: Apache-2.0
"""Files in Chrome's trace format: writing and merging.

``ts`` of an event is in microseconds after ``baseTimeNanoseconds`` of the Unix clock, as in
torch.profiler's files.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BASE = "baseTimeNanoseconds"
_FIRST_PID = 1 << 22  # Linux has no process with this number or a larger one
_FLOW_PHASES = frozenset("stf")
_ID_STEP = 1 << 40  # between the flows of one file and of the next


def check_writable(path: Path) -> None:
    """Raise OSError, with a sentence, if no file can be written to ``path``."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file for the trace")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"cannot write the trace to {path}: the folder {path.parent} does not exist; create "
            "it, or name another file"
        )
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(
            f"cannot write the trace to {path}: {path.parent} is not writable; name a file "
            "elsewhere"
        )


def write_trace(path: Path, trace: dict[str, Any]) -> int:
    """Write a whole file or none, compressed if its name ends in .gz. Returns its size in bytes."""
    data = json.dumps(trace, separators=(",", ":")).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, compresslevel=5)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(data)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return len(data)


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace. Raises ValueError, with a sentence, for a file that is not a trace."""
    data = path.read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        trace = json.loads(data)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} is not a JSON trace, or is truncated: {error}") from error
    if isinstance(trace, list):  # the short form of the format
        trace = {"traceEvents": trace}
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(
            f"{path} has no list of traceEvents; pass a trace written by penstock or torch.profiler"
        )
    return trace


def merge_traces(traces: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str]) -> int:
    """Merge several trace files into one: of the ranks of a job, of torch.profiler, or both.

    Timestamps are shifted to one clock, the Unix clock of the machines, whose clocks should agree.
    Ranks whose processes have the same number get other numbers; torch's trace of a rank stays
    together with penstock's if it has the same process number and no other rank.

    Args:
        traces (Sequence[str | os.PathLike]): Files written by :func:`penstock.trace`,
            ``penstock trace`` or torch.profiler's ``export_chrome_trace``, compressed or not; at
            least one.
        path (str | os.PathLike): File to write, compressed if its name ends in ".gz".

    Returns:
        int: Number of events in the merged file.

    Raises:
        ValueError: If a file is not a trace, the clock of only some traces is known, or there are
            no traces.
        OSError: If a file cannot be read or written.

    Example::

        with penstock.trace("steps.json", steps=50), torch.profiler.profile() as profiler:
            train()
        profiler.export_chrome_trace("torch.json")
        penstock.merge_traces(["steps.json", "torch.json"], "both.json.gz")
    """
    target = Path(path)
    check_writable(target)
    if not traces:
        raise ValueError(
            "merge_traces() requires at least one trace; pass the names of trace files"
        )
    read = [read_trace(Path(name)) for name in traces]
    bases = [int(trace.get(BASE, 0)) for trace in read]
    if len({base == 0 for base in bases}) > 1:
        alone = [str(name) for name, base in zip(traces, bases, strict=True) if base == 0]
        raise ValueError(
            f"{', '.join(alone)} has no {BASE}, so its clock is unknown and it cannot be merged "
            "with the others; traces of penstock and of torch.profiler have it"
        )
    base = min(bases)
    pids: dict[Any, int | None] = {}  # the rank of each process number
    events: list[dict[str, Any]] = []
    for number, (trace, own_base) in enumerate(zip(read, bases, strict=True)):
        moved = _moved_pids(trace, pids, number)
        for event in trace["traceEvents"]:
            if "ts" in event:
                event["ts"] = event["ts"] + (own_base - base) / 1000
            if event.get("pid") in moved:
                event["pid"] = moved[event["pid"]]
            if event.get("ph") in _FLOW_PHASES and isinstance(event.get("id"), int):
                event["id"] += number * _ID_STEP
            events.append(event)
    merged = {"displayTimeUnit": "ms", BASE: base, "traceEvents": events}
    write_trace(target, merged)
    return len(events)


def _moved_pids(trace: dict[str, Any], pids: dict[Any, int | None], number: int) -> dict[Any, int]:
    """Return new numbers for the trace's processes whose numbers are taken by other ranks."""
    rank = _rank_of(trace)
    moved = {}
    for pid in {event["pid"] for event in trace["traceEvents"] if "pid" in event}:
        if not isinstance(pid, int):
            continue  # torch's tracks that are not processes
        if pid in pids and rank is not None and pids[pid] not in (None, rank):
            moved[pid] = _FIRST_PID * (number + 1) + pid % _FIRST_PID
        elif pids.get(pid) is None:
            pids[pid] = rank
    return moved


def _rank_of(trace: dict[str, Any]) -> int | None:
    """Return the trace's rank; None if the trace has none."""
    for key in ("penstock", "distributedInfo"):
        about = trace.get(key)
        if isinstance(about, dict) and isinstance(about.get("rank"), int):
            rank: int = about["rank"]
            return rank
    return None
