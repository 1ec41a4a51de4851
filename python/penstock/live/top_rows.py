# SPDX-License-Identifier: Apache-2.0
"""The tables of `penstock top`: their columns, the rows of a pool in each, a job's ranks as one
row, the order of rows, and the branches of a tree in front of them. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.live.pool_history import EventView
from penstock.live.pool_view import STEP_PARTS, Ledger, PoolView, TrainerView, WorkerView


@dataclass(frozen=True, slots=True)
class Column:
    """A column. Numbers are right-aligned. ``meaning`` is shown in the help."""

    name: str
    title: str
    meaning: str
    is_number: bool = False


@dataclass(slots=True)
class Row:
    """A row. ``cells`` has the texts by column, and ``keys`` the sort keys of columns that are not
    sorted by text. ``parent`` is another row's id. ``detail`` is a sentence about the selected row.
    ``tone`` is good, warn, bad or dim."""

    id: str
    cells: dict[str, str]
    keys: dict[str, float] = field(default_factory=dict)
    parent: str | None = None
    detail: str = ""
    tone: str = ""
    user: str = ""
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Table:
    """A table. ``branch`` is the column in which a tree is drawn, and ``rows`` makes the rows."""

    name: str
    columns: Sequence[Column]
    branch: str
    rows: Callable[[DisplayData, bool], list[Row]]
    sort: str = ""  # the initial sort column; "" keeps the order of the rows
    is_descending: bool = False


@dataclass(frozen=True, slots=True)
class DisplayData:
    """The data of a display: the current pool, earlier ledgers of its trainers, and its events."""

    view: PoolView
    ledgers_before: Mapping[str, Ledger]
    events: Sequence[EventView]


_WAITS_WARN, _WAITS_BAD = 0.1, 0.3  # shares of a trainer's time
_SILENT_S = 5.0

_LIMITS = {"unknown": "-"}


def _job_rows(display: DisplayData, is_tree: bool) -> list[Row]:
    rows: list[Row] = []
    for group in job_groups(display.view):
        parent = None
        if is_tree and group.has_ranks:
            rows.append(_group_row(group))
            parent = rows[-1].id
        rows += [_trainer_row(rank, parent) for rank in group.ranks]
    if is_tree:
        there = {one.id: one.user or "" for one in display.view.trainers}
        for worker in display.view.workers:
            if worker.works_for in there:
                rows.append(
                    Row(
                        id=f"{worker.works_for}/{worker.id}",
                        cells={
                            "job": f"worker {worker.name}",
                            "id": worker.id[:8],
                            "limit": worker.state,
                        },
                        parent=worker.works_for,
                        tone="dim",
                        user=there[worker.works_for],
                    )
                )
    return rows


def _group_row(group: JobGroup) -> Row:
    first, waited = group.ranks[0], group.waited_share()
    rate, moved = group.total("batches_per_s"), group.total("bytes_per_s")
    workers, wanted = group.total("workers"), group.total("workers_wanted")
    delivered, flight = group.total("delivered_batches"), group.total("bytes_in_flight")
    return Row(
        id=f"group {group.id}",
        cells={
            "job": group.title,
            "user": first.user or "",
            "id": group.id[:8],
            "workers": number(workers),
            "wanted": number(wanted),
            "batches": rate_text(rate),
            "bytes": byte_rate(moved),
            "waits": share(waited),
            "flight": byte_count(flight),
            "delivered": number(delivered),
        },
        keys=_known(
            workers=workers, wanted=wanted, batches=rate, bytes=moved, waits=waited,
            flight=flight, delivered=delivered,
        ),
        detail="totals of the ranks of one job; its waiting share is the maximum of its ranks",
        tone=_tone_of_waiting(waited),
        user=first.user or "",
        rate=rate or 0.0,
    )  # fmt: skip


def _trainer_row(trainer: TrainerView, parent: str | None) -> Row:
    is_rank = trainer.world_size > 1
    place = f"rank {trainer.rank}" if is_rank else ""
    name = place if parent is not None else ", ".join(x for x in (trainer.job, place) if x)
    cells = {
        "job": name,
        "user": trainer.user or "",
        "trainer": trainer.name,
        "id": trainer.id[:8],
        "workers": str(trainer.workers),
        "wanted": str(trainer.workers_wanted) if trainer.is_measured else "-",
        "batches": rate_text(trainer.batches_per_s),
        "bytes": byte_rate(trainer.bytes_per_s),
        "waits": share(trainer.waited_share),
        "ready": str(trainer.ready_batches),
        "asked": str(trainer.asked_batches),
        "flight": byte_count(trainer.bytes_in_flight),
        "delivered": number(trainer.delivered_batches),
        "limit": _LIMITS.get(trainer.limited_by, trainer.limited_by),
    }
    detail, tone = trainer.reason, _tone_of_waiting(trainer.waited_share)
    if trainer.is_idle:
        detail = f"idle for {trainer.idle_s:.0f} s, as between epochs"
        tone = "dim"
        cells |= {"wanted": "-", "batches": "idle", "bytes": "-", "waits": "-"}
    elif trainer.workers == 0:
        detail, tone = f"no workers; {trainer.reason}", "bad"
    return Row(
        id=trainer.id,
        cells=cells,
        keys=_known(
            workers=trainer.workers,
            wanted=trainer.workers_wanted,
            batches=trainer.batches_per_s,
            bytes=trainer.bytes_per_s,
            waits=trainer.waited_share,
            ready=trainer.ready_batches,
            asked=trainer.asked_batches,
            flight=trainer.bytes_in_flight,
            delivered=trainer.delivered_batches,
        ),
        parent=parent,
        detail=detail,
        tone=tone,
        user=trainer.user or "",
        rate=trainer.batches_per_s or 0.0,
    )


def _worker_rows(display: DisplayData, is_tree: bool) -> list[Row]:
    titles = display.view.job_titles()
    rows = []
    if is_tree:  # workers below their hosts
        for host in dict.fromkeys(worker.host for worker in display.view.workers):
            count = sum(worker.host == host for worker in display.view.workers)
            cells = {"worker": host, "state": f"{count} workers"}
            rows.append(Row(id=f"host {host}", cells=cells, detail="machine with its workers"))
    for worker in display.view.workers:
        rows.append(_worker_row(worker, titles, f"host {worker.host}" if is_tree else None))
    return rows


def _worker_row(worker: WorkerView, titles: Mapping[str, str], parent: str | None) -> Row:
    works_for = "no job"
    if worker.works_for is not None:
        works_for = titles.get(worker.works_for, f"trainer {worker.works_for[:8]}, which has left")
    unfit = [titles[one] for one in worker.unfit_for if one in titles]
    tone = {"serving": "good", "free": "", "stuck": "bad"}.get(worker.state, "warn")
    detail = f"runs {worker.software or 'unknown versions'}"
    if unfit:
        detail, tone = (
            f"cannot run {', '.join(unfit)}: {worker.unfit_reason or 'no reason given'}",
            "bad",
        )
    if worker.since_report_s > _SILENT_S:
        detail, tone = f"no report for {worker.since_report_s:.0f} s", "bad"
    return Row(
        id=worker.id,
        cells={
            "worker": worker.name,
            "id": worker.id[:8],
            "state": worker.state,
            "job": works_for,
            "address": worker.endpoint,
            "seen": f"{worker.since_report_s:.1f}",
            "software": worker.software,
        },
        keys={"seen": worker.since_report_s},
        parent=parent,
        detail=detail,
        tone=tone,
    )


def _stage_rows(display: DisplayData, is_tree: bool) -> list[Row]:
    rows = []
    for group in job_groups(display.view):
        parent = None
        if is_tree and group.has_ranks:
            parent = f"group {group.id}"
            rows.append(Row(id=parent, cells={"job": group.title, "id": group.id[:8]}))
        rows += [
            _stage_row(rank, display.ledgers_before.get(rank.id), parent) for rank in group.ranks
        ]
    return rows


def _stage_row(trainer: TrainerView, before: Ledger | None, parent: str | None) -> Row:
    place = f"rank {trainer.rank}" if trainer.world_size > 1 else ""
    name = place if parent is not None else ", ".join(x for x in (trainer.job, place) if x)
    cells = {"job": name, "id": trainer.id[:8]}
    keys: dict[str, float] = {}
    if trainer.ledger is not None:
        lately = trainer.ledger.since(before)
        if lately.steps > 0:
            keys["step"] = 1e3 * lately.total_s / lately.steps
        keys |= lately.shares()
        detail = "shares of the step time since the last refresh; of all steps at first"
    elif trainer.step_s is not None and trainer.starved_s is not None:
        step_s = trainer.step_s + trainer.starved_s
        keys["step"] = 1e3 * step_s
        if step_s > 0:
            keys["compute"] = trainer.step_s / step_s
            keys["waiting"] = trainer.starved_s / step_s
        detail = "no time breakdown reported: only computing and waiting times are known"
    else:
        detail = "no measurements yet"
    if trainer.ledger is not None and "compute" in keys:
        keys["waiting"] = sum(keys[part.name] for part in STEP_PARTS if part.is_waiting)
    for name, value in keys.items():
        cells[name] = f"{value:.2f}" if name == "step" else f"{value:.1%}"
    for part in STEP_PARTS:
        cells.setdefault(part.name, "-")
    tone = _tone_of_waiting(keys.get("waiting"))
    user = trainer.user or ""
    return Row(trainer.id, cells, keys, parent=parent, detail=detail, tone=tone, user=user)


_EVENT_TONES = {
    "worker_died": "bad",
    "worker_left": "warn",
    "trainer_left": "dim",
    "hedged": "warn",
}


def _event_rows(display: DisplayData, is_tree: bool) -> list[Row]:
    return [
        Row(
            id=f"event {event.sequence}",
            cells={
                "when": time.strftime("%H:%M:%S", time.localtime(event.at)),
                "kind": event.kind.replace("_", " "),
                "text": event.text,
            },
            keys={"when": event.at},
            detail=event.text,
            tone=_EVENT_TONES.get(event.kind, ""),
        )
        for event in reversed(display.events)
    ]


TABLES = (
    Table(
        "Jobs",
        (
            Column("job", "JOB", "program and dataset, with ranks and workers below it"),
            Column("user", "USER", "user whose key the trainer uses"),
            Column("trainer", "TRAINER", "host and process"),
            Column("id", "ID", "first digits of the id"),
            Column("workers", "WORKERS", "number of workers", True),
            Column("wanted", "WANTED", "number of workers that the job can use", True),
            Column("batches", "BATCH/s", "recent batches per second", True),
            Column(
                "bytes", "BYTES/s", "recent bytes per second, from the size of the batches", True
            ),
            Column("waits", "WAITS", "share of the time spent waiting for a batch", True),
            Column("ready", "READY", "batches ready for the trainer", True),
            Column("asked", "ASKED", "batches requested by the trainer", True),
            Column("flight", "FLIGHT", "bytes of batches in transit", True),
            Column("delivered", "DELIVERED", "batches delivered since the start", True),
            Column("limit", "LIMITED BY", "current bottleneck"),
        ),
        "job",
        _job_rows,
    ),
    Table(
        "Workers",
        (
            Column("worker", "WORKER", "host and process"),
            Column("id", "ID", "first digits of the id"),
            Column("state", "STATE", "serving, free, moving to another job, stuck, or draining"),
            Column("job", "WORKS FOR", "the job, with the trainer's host and process"),
            Column("address", "REACHED AT", "address that trainers connect to"),
            Column("seen", "SEEN s", "seconds since its last report", True),
            Column("software", "SOFTWARE", "its versions"),
        ),
        "worker",
        _worker_rows,
    ),
    Table(
        "Stages",
        (
            Column("job", "JOB", "program and dataset, by rank"),
            Column("id", "ID", "first digits of the id"),
            Column("step", "STEP ms", "from one batch to the next", True),
            Column("waiting", "WAITING", "sum of all shares except compute and loader", True),
            *(Column(p.name, p.title.upper(), p.meaning, True) for p in STEP_PARTS),
        ),
        "job",
        _stage_rows,
    ),
    Table(
        "Events",
        (
            Column("when", "WHEN", "time of day"),
            Column("kind", "KIND", "joined, died, left, assigned, hedged, replanned or scaled"),
            Column("text", "EVENT", "description"),
        ),
        "when",
        _event_rows,
    ),
)


def _known(**values: float | None) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def _tone_of_waiting(waited: float | None) -> str:
    if waited is None:
        return ""
    return "bad" if waited >= _WAITS_BAD else "warn" if waited >= _WAITS_WARN else "good"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def rate_text(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def byte_count(value: float | None) -> str:
    """Format a number of bytes in the unit with the fewest digits."""
    if value is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def byte_rate(value: float | None) -> str:
    return "-" if value is None else f"{byte_count(value)}/s"


def as_json(view: PoolView) -> dict[str, Any]:
    """Return the object that `penstock top --once --json` prints."""
    return {**view.as_json(), "jobs": [group.as_json() for group in job_groups(view)]}


@dataclass(frozen=True, slots=True)
class JobGroup:
    """The ranks of a job, in order. ``id`` is the id of the group, or of the only trainer."""

    id: str
    ranks: tuple[TrainerView, ...]

    @property
    def has_ranks(self) -> bool:
        return self.ranks[0].world_size > 1

    @property
    def title(self) -> str:
        first = self.ranks[0]
        if not self.has_ranks:
            return first.job
        seen = len(self.ranks)
        count = f"{first.world_size} ranks"
        return f"{first.job}, {count if seen == first.world_size else f'{seen} of {count}'}"

    def total(self, name: str) -> float | None:
        """Sum over the ranks with a known value; None if no rank has one."""
        known = [getattr(rank, name) for rank in self.ranks]
        known = [value for value in known if value is not None]
        return sum(known) if known else None

    def waited_share(self) -> float | None:
        """Return the share of the rank that waits most, as the other ranks in turn wait for it."""
        return max((r.waited_share for r in self.ranks if r.waited_share is not None), default=None)

    def as_json(self) -> dict[str, Any]:
        first = self.ranks[0]
        return {
            "id": self.id,
            "job": first.job,
            "user": first.user,
            "world_size": first.world_size,
            "ranks": [rank.id for rank in self.ranks],
            "workers": self.total("workers"),
            "batches_per_s": self.total("batches_per_s"),
            "bytes_per_s": self.total("bytes_per_s"),
            "waited_share_max": self.waited_share(),
            "delivered_batches": self.total("delivered_batches"),
        }


def job_groups(view: PoolView) -> Sequence[JobGroup]:
    """Return the groups in the order in which the controller lists their first ranks."""
    by_id: dict[str, list[TrainerView]] = {}
    for trainer in view.trainers:
        by_id.setdefault(trainer.group or trainer.id, []).append(trainer)
    return [
        JobGroup(identity, tuple(sorted(ranks, key=lambda rank: rank.rank)))
        for identity, ranks in by_id.items()
    ]


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A row to display. ``branch`` is drawn in front of the row's name."""

    row: Row
    branch: str = ""
    is_folded: bool = False


def sorted_rows(rows: Sequence[Row], column: str, is_descending: bool) -> list[Row]:
    """Sort by number if the column has numbers, else by text. Unknown values are last."""
    if not column:
        return list(rows)
    if any(column in row.keys for row in rows):
        known = [row for row in rows if column in row.keys]
        known.sort(key=lambda row: row.keys[column], reverse=is_descending)
        return known + [row for row in rows if column not in row.keys]
    return sorted(rows, key=lambda row: row.cells.get(column, "").lower(), reverse=is_descending)


def matcher(text: str) -> Callable[[Row], bool]:
    """Return a test whether one of a row's cells contains the text, ignoring case. If several texts
    are separated by |, one match is enough."""
    wanted = [part.lower() for part in text.split("|") if part]

    def matches(row: Row) -> bool:
        if not wanted:
            return True
        cells = "\n".join(row.cells.values()).lower()
        return any(part in cells for part in wanted)

    return matches


def in_tree(
    rows: Sequence[Row], is_shown: Callable[[Row], bool], folded: Collection[str], in_ascii: bool
) -> list[ShownRow]:
    """Arrange rows below their parents. The ancestors of a shown row are shown, too, and a row
    whose parent is missing becomes a root."""
    by_id = {row.id: row for row in rows}
    below: dict[str | None, list[Row]] = {}
    kept: set[str] = set()
    for row in rows:
        parent = row.parent if row.parent in by_id else None
        below.setdefault(parent, []).append(row)
        place: Row | None = row if is_shown(row) else None
        while place is not None and place.id not in kept:
            kept.add(place.id)
            place = by_id.get(place.parent or "")
    between, last, through = ("|- ", "`- ", "|  ") if in_ascii else ("├─ ", "└─ ", "│  ")

    def walk(parent: str | None, indent: str) -> Iterator[ShownRow]:
        children = [row for row in below.get(parent, []) if row.id in kept]
        for place, row in enumerate(children):
            is_last = place + 1 == len(children)
            branch = "" if parent is None else indent + (last if is_last else between)
            is_folded = row.id in folded and row.id in below
            yield ShownRow(row, branch, is_folded)
            if not is_folded:
                more = "" if parent is None else indent + ("   " if is_last else through)
                yield from walk(row.id, more)

    return list(walk(None, ""))
