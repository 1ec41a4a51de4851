# SPDX-License-Identifier: Apache-2.0
"""The tables of `penstock top`: their columns, the rows of a pool in each, and the order and the
tree of rows. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.live.pool_history import EndedJob, EventView
from penstock.live.pool_view import (
    LIMITS,
    STEP_PARTS,
    WAITING_BAD,
    WAITING_WARN,
    HostLoad,
    JobGroup,
    Ledger,
    PoolView,
    TrainerView,
    WorkerView,
)

SILENT_S = 5.0  # a worker without reports for longer has a problem
# The formats are the same as in the dashboard (pages/words.js).
_WORKER_TONES = {"serving": "good", "free": "", "stuck": "bad"}  # "warn" in any other state
_EVENT_TONES = {
    "worker_died": "bad", "worker_left": "warn", "trainer_left": "dim", "hedged": "warn",
}  # fmt: skip


def count(value: float) -> str:
    return f"{value:,.0f}"


def rate(value: float) -> str:
    return count(value) if value >= 100 else f"{value:.1f}"


def share(value: float) -> str:
    return f"{value:.1%}" if 0 < value < 0.1 else f"{value:.0%}"


def byte_count(value: float) -> str:
    """Format a number of bytes in the unit with the fewest digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def format_clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def byte_rate(value: float) -> str:
    return f"{byte_count(value)}/s"


def tone_of_waiting(waited: float | None) -> str:
    if waited is None:
        return ""
    return "bad" if waited >= WAITING_BAD else "warn" if waited >= WAITING_WARN else "good"


class Column(NamedTuple):
    """A column. ``meaning`` is shown in the help; ``show`` formats the values of a number."""

    name: str
    title: str
    meaning: str
    show: Callable[[Any], str] = str

    @property
    def is_number(self) -> bool:
        return self.show is not str


@dataclass(slots=True)
class Row:
    """A row. ``values`` are texts and numbers by column, None if unknown. ``parent`` is another
    row's id. ``detail`` is a sentence about the selected row. ``tone`` is good, warn, bad or dim.
    """

    id: str
    values: dict[str, Any]
    parent: str | None = None
    detail: str = ""
    tone: str = ""
    user: str = ""

    def cell(self, column: Column) -> str:
        value = self.values.get(column.name, "")
        if value is None:
            return "-"
        return value if isinstance(value, str) else column.show(value)


class DisplayData(NamedTuple):
    """The data of a display: the current pool, earlier ledgers of its trainers, its events, and the
    jobs that have ended."""

    view: PoolView
    ledgers_before: Mapping[str, Ledger]
    events: Sequence[EventView]
    ended: Sequence[EndedJob] = ()


class Table(NamedTuple):
    """A table. A tree is drawn in the first column."""

    name: str
    rows: Callable[[DisplayData, bool], Iterator[Row]]
    columns: Sequence[Column]


def _job_rows(display: DisplayData, is_tree: bool) -> Iterator[Row]:
    for group, parent in _groups(display, is_tree):
        if parent is not None:
            yield _group_row(group, parent)
        for rank in group.ranks:
            yield _trainer_row(rank, parent)
    for ended in reversed(display.ended):
        yield _ended_row(ended)
    users = {one.id: one.user or "" for one in display.view.trainers}
    for worker in display.view.workers if is_tree else ():
        if worker.works_for in users:
            values = {
                "job": f"worker {worker.name}", "id": worker.id[:8], "limited_by": worker.state,
            }  # fmt: skip
            identity, user = f"{worker.works_for}/{worker.id}", users[worker.works_for]
            yield Row(identity, values, worker.works_for, tone="dim", user=user)


def _groups(display: DisplayData, is_tree: bool) -> Iterator[tuple[JobGroup, str | None]]:
    """Yield the jobs, and the id of a job's row if its ranks are below one."""
    for group in display.view.job_groups():
        yield group, f"group {group.id}" if is_tree and group.has_ranks else None


def _rank_values(rank: TrainerView, parent: str | None) -> dict[str, Any]:
    parts = [rank.job] if parent is None else []
    parts += [f"rank {rank.rank}"] if rank.world_size > 1 else []
    return {"job": ", ".join(parts), "user": rank.user or "", "id": rank.id[:8]}


def _group_row(group: JobGroup, identity: str) -> Row:
    user = group.ranks[0].user or ""
    values = {column.name: group.total(column.name) for column in _JOB_NUMBERS}
    values |= {"waited_share": group.waited_share(), "job": group.title, "user": user}
    values["id"] = group.id[:8]
    verdict = group.verdict()
    return Row(identity, values, None, verdict.text, verdict.tone, user)


def _trainer_row(trainer: TrainerView, parent: str | None) -> Row:
    values = _rank_values(trainer, parent)
    values |= {column.name: getattr(trainer, column.name) for column in _JOB_NUMBERS}
    values["name"] = trainer.name
    values["limited_by"] = LIMITS.get(trainer.limited_by, trainer.limited_by)
    detail, tone = trainer.reason, tone_of_waiting(trainer.waited_share)
    if trainer.is_idle or not trainer.is_measured:
        values["workers_wanted"] = None
    if trainer.is_idle:
        values |= {"batches_per_s": "idle", "bytes_per_s": None, "waited_share": None}
        detail, tone = f"idle for {trainer.idle_s:.0f} s, as between epochs", "dim"
    elif trainer.workers == 0:
        detail, tone = f"no workers; {trainer.reason}", "bad"
    return Row(trainer.id, values, parent, detail, tone, trainer.user or "")


def _ended_row(ended: EndedJob) -> Row:
    values = {
        "job": ended.title,
        "user": ended.user or "",
        "id": ended.id[:8],
        "delivered_batches": ended.delivered_batches,
        "limited_by": f"ended {format_clock(ended.ended_at)}",
    }
    detail = f"ended {format_clock(ended.ended_at)}; {ended.verdict}"
    return Row(f"ended {ended.id}", values, None, detail, "dim", ended.user or "")


def _worker_rows(display: DisplayData, is_tree: bool) -> Iterator[Row]:
    workers, titles = display.view.workers, display.view.job_titles()
    for host in display.view.hosts() if is_tree else ():
        values: dict[str, Any] = {"name": host.name, "state": f"{len(host.workers)} workers"}
        values |= _load_values(host.load)
        detail = host.log[-1] if host.log else "machine with its workers"
        yield Row(f"host {host.name}", values, detail=detail)
    for worker in workers:
        yield _worker_row(worker, titles, f"host {worker.host}" if is_tree else None)


def _load_values(load: HostLoad | None) -> dict[str, Any]:
    if load is None:
        return {"cpu": None, "memory": None}
    return {"cpu": load.cpu_share, "memory": load.memory_share}


def _worker_row(worker: WorkerView, titles: Mapping[str, str], parent: str | None) -> Row:
    values: dict[str, Any] = {"id": worker.id[:8], "job": "no job"} | _load_values(worker.host_load)
    for name in ("name", "state", "endpoint", "since_report_s", "software"):
        values[name] = getattr(worker, name)
    if worker.works_for is not None:
        gone = f"trainer {worker.works_for[:8]}, which has left"
        values["job"] = titles.get(worker.works_for, gone)
    unfit = [titles[one] for one in worker.unfit_for if one in titles]
    detail = worker.log[-1] if worker.log else f"runs {worker.software or 'unknown versions'}"
    tone = _WORKER_TONES.get(worker.state, "warn")
    if unfit:
        detail = f"cannot run {', '.join(unfit)}: {worker.unfit_reason or 'no reason given'}"
        tone = "bad"
    if worker.since_report_s > SILENT_S:
        detail, tone = f"no report for {worker.since_report_s:.0f} s", "bad"
    return Row(worker.id, values, parent, detail, tone)


def _stage_rows(display: DisplayData, is_tree: bool) -> Iterator[Row]:
    for group, parent in _groups(display, is_tree):
        if parent is not None:
            yield Row(parent, {"job": group.title, "id": group.id[:8]})
        for rank in group.ranks:
            yield _stage_row(rank, display.ledgers_before.get(rank.id), parent)


def _stage_row(trainer: TrainerView, before: Ledger | None, parent: str | None) -> Row:
    times: dict[str, Any] = dict.fromkeys(("step_s", "waiting", *(p.name for p in STEP_PARTS)))
    detail = "no measurements yet"
    if trainer.ledger is not None:
        detail = "shares of the step time since the last refresh; of all steps at first"
        lately = trainer.ledger.since(before)
        if lately.steps > 0 and (shares := lately.shares()):
            times |= shares
            times["step_s"] = lately.total_s / lately.steps
            times["waiting"] = sum(shares[part.name] for part in STEP_PARTS if part.is_waiting)
    elif trainer.step_s is not None and trainer.starved_s is not None:
        detail = "no time breakdown reported: only computing and waiting times are known"
        times["step_s"] = whole = trainer.step_s + trainer.starved_s
        if whole > 0:
            times |= {"compute": trainer.step_s / whole, "waiting": trainer.starved_s / whole}
    tone = tone_of_waiting(times["waiting"])
    return Row(
        trainer.id, _rank_values(trainer, parent) | times, parent, detail, tone, trainer.user or ""
    )


def _event_rows(display: DisplayData, is_tree: bool) -> Iterator[Row]:
    for event in reversed(display.events):
        kind = event.kind.replace("_", " ")
        values = {"at": event.at, "kind": kind, "text": event.text}
        tone = _EVENT_TONES.get(event.kind, "")
        yield Row(f"event {event.sequence}", values, None, event.text, tone)


_ID = Column("id", "ID", "first digits of the id")
# Numbers of a job are fields of TrainerView, and have a sum over its ranks.
_JOB_NUMBERS = (
    Column("workers", "WORKERS", "number of workers", count),
    Column("workers_wanted", "WANTED", "number of workers that the job can use", count),
    Column("batches_per_s", "BATCH/s", "recent batches per second", rate),
    Column("bytes_per_s", "BYTES/s", "recent bytes per second: batches times size", byte_rate),
    Column("waited_share", "WAITS", "share of the time spent waiting for a batch", share),
    Column("ready_batches", "READY", "batches ready for the trainer", count),
    Column("asked_batches", "ASKED", "batches requested by the trainer", count),
    Column("bytes_in_flight", "FLIGHT", "bytes of batches in transit", byte_count),
    Column("delivered_batches", "DELIVERED", "batches delivered since the start", count),
)
JOBS = Table("Jobs", _job_rows, (
    Column("job", "JOB", "program and dataset, with ranks and workers below it"),
    Column("user", "USER", "user whose key the trainer uses"),
    Column("name", "TRAINER", "host and process"),
    _ID,
    *_JOB_NUMBERS,
    Column("limited_by", "LIMITED BY", "current bottleneck"),
))  # fmt: skip
WORKERS = Table("Workers", _worker_rows, (
    Column("name", "WORKER", "host and process"),
    _ID,
    Column("state", "STATE", "serving, free, moving to another job, stuck, or draining"),
    Column("job", "WORKS FOR", "the job, with the trainer's host and process"),
    Column("endpoint", "REACHED AT", "address that trainers connect to"),
    Column("since_report_s", "SEEN s", "seconds since its last report", "{:.1f}".format),
    Column("cpu", "CPU", "busy share of its machine's CPUs", "{:.0%}".format),
    Column("memory", "MEM", "used share of its machine's memory", "{:.0%}".format),
    Column("software", "SOFTWARE", "its versions"),
))  # fmt: skip
STAGES = Table("Stages", _stage_rows, (
    Column("job", "JOB", "program and dataset, by rank"),
    _ID,
    Column("step_s", "STEP ms", "from one batch to the next", lambda s: f"{1e3 * s:.2f}"),
    Column("waiting", "WAITING", "sum of all shares except compute and loader", "{:.1%}".format),
    *(Column(p.name, p.title.upper(), p.meaning, "{:.1%}".format) for p in STEP_PARTS),
))  # fmt: skip
EVENTS = Table("Events", _event_rows, (
    Column("at", "WHEN", "time of day", format_clock),
    Column("kind", "KIND", "joined, died, left, assigned, hedged, replanned or scaled"),
    Column("text", "EVENT", "description"),
))  # fmt: skip
TABLES = (JOBS, WORKERS, STAGES, EVENTS)


def sorted_rows(rows: Sequence[Row], column: Column | None, is_descending: bool) -> list[Row]:
    """Sort by a column, with unknown values last. None keeps the order."""
    if column is None:
        return list(rows)
    name, kind = column.name, (int, float) if column.is_number else str
    known = [row for row in rows if isinstance(row.values.get(name), kind)]

    def key(row: Row) -> Any:
        value = row.values[name]
        return value.lower() if isinstance(value, str) else value

    known.sort(key=key, reverse=is_descending)
    return known + [row for row in rows if not isinstance(row.values.get(name), kind)]


def matches(row: Row, columns: Sequence[Column], text: str) -> bool:
    """Return whether a cell contains the text, ignoring case, or one of several texts separated by
    |. An empty text matches all."""
    cells = "\n".join(row.cell(column) for column in columns).lower()
    wanted = [part for part in text.lower().split("|") if part]
    return not wanted or any(part in cells for part in wanted)


class ShownRow(NamedTuple):
    """A row to display. ``branch`` is drawn in front of its first cell."""

    row: Row
    branch: str = ""


def in_tree(
    rows: Sequence[Row], is_shown: Callable[[Row], bool], folded: Collection[str], in_ascii: bool
) -> list[ShownRow]:
    """Arrange rows below their parents. The ancestors of a shown row are shown, too, and a row
    whose parent is missing becomes a root."""
    by_id = {row.id: row for row in rows}
    below: dict[str | None, list[Row]] = {}
    kept: set[str] = set()
    for row in rows:
        below.setdefault(row.parent if row.parent in by_id else None, []).append(row)
        place: Row | None = row if is_shown(row) else None
        while place is not None and place.id not in kept:
            kept.add(place.id)
            place = by_id.get(place.parent or "")
    between, last, through = ("|- ", "`- ", "|  ") if in_ascii else ("├─ ", "└─ ", "│  ")

    def walk(parent: str | None, indent: str) -> Iterator[ShownRow]:
        children = [row for row in below.get(parent, []) if row.id in kept]
        for row in children:
            is_last, is_root = row is children[-1], parent is None
            is_folded = row.id in folded and row.id in below
            branch = "" if is_root else indent + (last if is_last else between)
            yield ShownRow(row, f"{branch}+ " if is_folded else branch)
            if not is_folded:
                yield from walk(row.id, "" if is_root else indent + ("   " if is_last else through))

    return list(walk(None, ""))
