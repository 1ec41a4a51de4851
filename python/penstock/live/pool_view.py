# SPDX-License-Identifier: Apache-2.0
"""A pool at one moment, for every display: printable names, derived rates, the state of a worker in
one word, and the time of steps by part.

`ask_pool` asks a controller for one view, and `StatusPoller` for a series of views. The rest is
pure.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock import _pool
from penstock.errors import PenstockError
from penstock.pool.pool_log import printable_line, short_id
from penstock.pool.pool_status import name_of, software_of

# The limits that a controller's status names, for people.
LIMITS = {
    "unknown": "not measured yet",
    "trainer": "the trainer",
    "workers": "the workers' CPUs",
    "waiting": "waiting in the workers",
    "link": "the link",
    "storage": "the storage",
    "sampler": "the sampler",
    "other": "causes other than workers",
}
# From these shares of waiting on, a job is shown as waiting, and as waiting much.
WAITING_WARN = 0.1
WAITING_BAD = 0.3
HOST_LINES_MAX = 5  # of the logs of a machine's workers
# The states of a worker, in the order in which totals are listed.
WORKER_STATES = ("serving", "free", "moving", "stuck", "draining")


@dataclass(frozen=True, slots=True)
class EngineView:
    """The engine that starts and stops the pool's workers."""

    name: str
    wanted: int
    running: int
    starting: int
    stopping: int
    workers_min: int
    workers_max: int
    refusals: int
    reason: str
    refusal: str | None
    trouble: str | None
    spent: float | None
    budget: float | None
    since_report_s: float


@dataclass(frozen=True, slots=True)
class HostLoad:
    """The use of a machine, in shares and bytes, without the caches of its kernel."""

    cpu_share: float
    cpu_count: int
    memory_bytes: int
    memory_used_bytes: int

    @property
    def memory_share(self) -> float:
        return self.memory_used_bytes / self.memory_bytes if self.memory_bytes else 0.0


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker. ``name`` is HOST/PROCESS. ``works_for`` is a trainer's id. ``log`` has the last
    lines of its log."""

    id: str
    name: str
    host: str
    endpoint: str
    software: str
    state: str
    works_for: str | None
    unfit_for: tuple[str, ...]
    unfit_reason: str | None
    host_load: HostLoad | None
    kept_bytes: int  # of the batches that it has made and that are kept
    kept_answers: int  # batches that it did not have to make
    log: tuple[str, ...]
    since_report_s: float


class HostView(NamedTuple):
    """A machine with workers. ``load`` is of its latest report, None if it is unknown; ``log`` has
    the last lines of its workers, with their names, oldest first."""

    name: str
    workers: tuple[WorkerView, ...]
    load: HostLoad | None
    log: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TrainerView:
    """One rank of a job. ``group`` is the same for all ranks of a job; None for a job with one
    rank."""

    id: str
    job: str
    name: str
    host: str
    software: str
    user: str | None
    group: str | None
    rank: int
    world_size: int
    workers: int
    workers_max: int
    workers_wanted: int
    idle_s: float
    since_report_s: float
    batches_per_s: float | None
    bytes_per_s: float | None
    waited_share: float | None
    limited_by: str
    reason: str
    step_s: float | None
    starved_s: float | None
    worker_s: float | None
    worker_cpu_share: float | None
    batch_bytes: int | None
    link_bytes_per_s: int | None
    is_paused: bool
    ready_batches: int
    wanted_batches: int
    asked_batches: int
    bytes_in_flight: int
    waited_s: float
    delivered_batches: int
    hedged_batches: int
    plan_changes: int
    ledger: Ledger | None

    @property
    def is_idle(self) -> bool:
        """Return whether it needs no workers now, as between epochs."""
        return self.workers_max == 0

    @property
    def is_measured(self) -> bool:
        """Return whether its need is measured. Before that, it is assumed to need as many workers
        as it may have."""
        return self.limited_by != "unknown"


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool at one moment. ``at`` is in seconds since 1970."""

    at: float
    controller: str
    endpoint: str
    is_settled: bool
    policy_trouble: str | None
    fenced_incarnations: int
    engine: EngineView | None
    workers: tuple[WorkerView, ...]
    trainers: tuple[TrainerView, ...]
    left_out: int

    def trainer(self, identity: str | None) -> TrainerView | None:
        return next((one for one in self.trainers if one.id == identity), None)

    def job_title(self, identity: str) -> str:
        """Return the displayed name of a trainer; two trainers of one job run in different
        processes."""
        trainer = self.trainer(identity)
        return f"trainer {identity[:8]}" if trainer is None else f"{trainer.job} of {trainer.name}"

    def job_titles(self) -> dict[str, str]:
        """Return the displayed names of all trainers, by id."""
        return {one.id: f"{one.job} of {one.name}" for one in self.trainers}

    def totals(self) -> dict[str, Any]:
        """Return the totals of the pool; ``waited_share`` is the mean over the trainers that
        request batches."""
        waited = [one.waited_share for one in self.trainers if one.waited_share is not None]
        states = [one.state for one in self.workers]
        return {
            "trainers": len(self.trainers),
            "trainers_idle": sum(one.is_idle for one in self.trainers),
            "workers": len(self.workers),
            "workers_by_state": {state: states.count(state) for state in WORKER_STATES},
            "kept_bytes": sum(one.kept_bytes for one in self.workers),
            "kept_answers": sum(one.kept_answers for one in self.workers),
            "workers_wanted": sum(one.workers_wanted for one in self.trainers if not one.is_idle),
            "batches_per_s": sum(one.batches_per_s or 0.0 for one in self.trainers),
            "bytes_per_s": sum(one.bytes_per_s or 0.0 for one in self.trainers),
            "waited_share": sum(waited) / len(waited) if waited else None,
        }

    def hosts(self) -> list[HostView]:
        """Return the machines with workers, in the order in which the controller lists them."""
        by_name: dict[str, list[WorkerView]] = {}
        for worker in self.workers:
            by_name.setdefault(worker.host, []).append(worker)
        return [_host_view(name, tuple(workers)) for name, workers in by_name.items()]

    def job_groups(self) -> list[JobGroup]:
        """Return the jobs, in the order in which the controller lists their first ranks."""
        by_id: dict[str, list[TrainerView]] = {}
        for trainer in self.trainers:
            by_id.setdefault(trainer.group or trainer.id, []).append(trainer)
        return [
            JobGroup(identity, tuple(sorted(ranks, key=lambda rank: rank.rank)))
            for identity, ranks in by_id.items()
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the view for programs, with the totals and the jobs. `penstock top --once --json`
        prints it."""
        fields = dataclasses.asdict(self)
        for trainer, plain in zip(self.trainers, fields["trainers"], strict=True):
            plain["is_idle"] = trainer.is_idle
        jobs = [group.as_json() for group in self.job_groups()]
        hosts = [_host_json(host) for host in self.hosts()]
        return {**fields, "totals": self.totals(), "jobs": jobs, "hosts": hosts}


class Verdict(NamedTuple):
    """A sentence about a job, for its operator. ``tone`` is good, warn, bad, or "" if there is
    nothing to judge."""

    tone: str
    text: str


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
        first, seen = self.ranks[0], len(self.ranks)
        if not self.has_ranks:
            return first.job
        count = f"{first.world_size} ranks"
        return f"{first.job}, {count if seen == first.world_size else f'{seen} of {count}'}"

    def total(self, name: str) -> Any:
        """Sum over the ranks with a known value; None if no rank has one."""
        known = [getattr(rank, name) for rank in self.ranks]
        known = [value for value in known if value is not None]
        return sum(known) if known else None

    def waited_share(self) -> float | None:
        """Return the share of the rank that waits most, as the other ranks in turn wait for it."""
        return max((r.waited_share for r in self.ranks if r.waited_share is not None), default=None)

    @property
    def is_idle(self) -> bool:
        return all(rank.is_idle for rank in self.ranks)

    def verdict(self) -> Verdict:
        """Judge the job by its rank that waits most: the other ranks in turn wait for it."""
        if self.is_idle:
            idle_s = min(rank.idle_s for rank in self.ranks)
            return Verdict("", f"idle for {idle_s:.0f} s, as between epochs")
        without = [rank for rank in self.ranks if not rank.is_idle and rank.workers == 0]
        if without:
            who = f"rank {without[0].rank} has" if self.has_ranks else "it has"
            return Verdict("bad", f"{who} no workers: {without[0].reason}")
        measured = [one for one in self.ranks if one.is_measured and one.waited_share is not None]
        if not measured:
            return Verdict("", "not measured yet")
        worst = max(measured, key=lambda one: one.waited_share or 0.0)
        waited = worst.waited_share or 0.0
        if waited < WAITING_WARN:
            who = "no rank waits more than" if self.has_ranks else "it waits"
            return Verdict("good", f"{who} {waited:.0%} of the time")
        who = f"rank {worst.rank} waits" if self.has_ranks else "it waits"
        limit = LIMITS.get(worst.limited_by, worst.limited_by)
        text = f"{who} {waited:.0%} of the time, limited by {limit}"
        least = min(one.waited_share or 0.0 for one in measured)
        if least < waited / 2:
            text += f"; another rank waits only {least:.0%}"
        missing = sum(max(0, one.workers_wanted - one.workers) for one in self.ranks)
        if missing > 0:
            text += f"; {missing} more worker{'s' if missing > 1 else ''} would help"
        return Verdict("bad" if waited >= WAITING_BAD else "warn", text)

    def as_json(self) -> dict[str, Any]:
        first, verdict = self.ranks[0], self.verdict()
        return {
            "id": self.id,
            "job": first.job,
            "user": first.user,
            "world_size": first.world_size,
            "ranks": [rank.id for rank in self.ranks],
            "title": self.title,
            "is_idle": self.is_idle,
            "verdict": verdict.text,
            "tone": verdict.tone,
            "workers": self.total("workers"),
            "workers_wanted": sum(one.workers_wanted for one in self.ranks if not one.is_idle),
            "batches_per_s": self.total("batches_per_s"),
            "bytes_per_s": self.total("bytes_per_s"),
            "waited_share_max": self.waited_share(),
            "delivered_batches": self.total("delivered_batches"),
        }


def pool_view(status: Mapping[str, Any], at: float) -> PoolView:
    """Convert a controller's ``status`` (csrc/controller/pool_status.h), received at ``at``."""
    controller = status["controller"]
    trouble = controller["policy_trouble"]
    return PoolView(
        at=at,
        controller=controller["id"],
        endpoint=controller["endpoint"],
        is_settled=controller["is_settled"],
        policy_trouble=None if trouble is None else printable_line(trouble),
        fenced_incarnations=controller["fenced_incarnations"],
        engine=_engine_view(status["engine"]),
        workers=tuple(_worker_view(one) for one in status["workers"]),
        trainers=tuple(_trainer_view(one) for one in status["trainers"]),
        left_out=status["workers_left_out"] + status["trainers_left_out"],
    )


def with_short_ids(view: PoolView) -> PoolView:
    """Shorten each id to its displayed part, and leave out the lines of logs, for readers who must
    not act by ids."""

    def short_or_none(identity: str | None) -> str | None:
        return None if identity is None else short_id(identity)

    return dataclasses.replace(
        view,
        controller=short_id(view.controller),
        workers=tuple(
            dataclasses.replace(
                worker,
                id=short_id(worker.id),
                works_for=short_or_none(worker.works_for),
                unfit_for=tuple(short_id(trainer) for trainer in worker.unfit_for),
                log=(),
            )
            for worker in view.workers
        ),
        trainers=tuple(
            dataclasses.replace(
                trainer, id=short_id(trainer.id), group=short_or_none(trainer.group)
            )
            for trainer in view.trainers
        ),
    )


def _engine_view(engine: Mapping[str, Any] | None) -> EngineView | None:
    if engine is None:
        return None
    names = [field.name for field in dataclasses.fields(EngineView)]
    fields = {name: engine[name] for name in names}
    for name in ("name", "reason", "refusal", "trouble"):
        fields[name] = _text_or_none(fields[name])
    return EngineView(**fields)


def _worker_view(worker: dict[str, Any]) -> WorkerView:
    works_for = worker["trainer"] or worker["assigned_to"]
    if worker["is_draining"]:
        state = "draining"
    elif worker["stuck_s"] is not None:
        state = "stuck"
    elif worker["is_withdrawn"]:
        state = "moving"
    else:
        state = "free" if works_for is None else "serving"
    name = name_of(worker)
    return WorkerView(
        id=worker["id"],
        name=name,
        host=_host_of(name),
        endpoint=printable_line(worker["endpoint"]),
        software=software_of(worker),
        state=state,
        works_for=works_for,
        unfit_for=tuple(worker["unfit_for"]),
        unfit_reason=_text_or_none(worker["unfit_reason"]),
        host_load=None if worker["host_load"] is None else HostLoad(**worker["host_load"]),
        kept_bytes=worker["kept_bytes"],
        kept_answers=worker["kept_answers"],
        log=tuple(printable_line(line) for line in worker["log"].splitlines() if line),
        since_report_s=worker["since_report_s"],
    )


def _host_view(name: str, workers: tuple[WorkerView, ...]) -> HostView:
    latest = min(workers, key=lambda one: one.since_report_s)
    log = sorted(
        f"{when} {worker.name}: {text}"
        for worker in workers
        for when, _, text in (line.partition(" ") for line in worker.log)
    )
    return HostView(name, workers, latest.host_load, tuple(log[-HOST_LINES_MAX:]))


def _host_json(host: HostView) -> dict[str, Any]:
    return {
        "name": host.name,
        "workers": len(host.workers),
        "serving": sum(worker.state == "serving" for worker in host.workers),
        "load": None if host.load is None else dataclasses.asdict(host.load),
        "log": host.log,
    }


def _trainer_view(trainer: dict[str, Any]) -> TrainerView:
    queue = trainer["queue"]
    rate, size = trainer["batches_per_s"], trainer["batch_bytes"]
    name = name_of(trainer)
    as_they_are = (
        "id", "group", "rank", "world_size", "workers", "workers_max", "workers_wanted", "idle_s",
        "since_report_s", "batches_per_s", "waited_share", "limited_by", "step_s", "starved_s",
        "worker_s", "worker_cpu_share", "batch_bytes", "link_bytes_per_s", "is_paused",
        "hedged_batches", "plan_changes",
    )  # fmt: skip
    of_queue = (
        "ready_batches", "wanted_batches", "asked_batches", "bytes_in_flight", "waited_s",
        "delivered_batches",
    )  # fmt: skip
    return TrainerView(
        **{name: trainer[name] for name in as_they_are},
        **{name: queue[name] for name in of_queue},
        job=printable_line(trainer["job"]),
        name=name,
        host=_host_of(name),
        software=software_of(trainer),
        user=_text_or_none(trainer["user"]),
        bytes_per_s=None if rate is None or size is None else rate * size,
        reason=printable_line(trainer["reason"]),
        ledger=ledger_of(trainer),
    )


def _text_or_none(text: str | None) -> str | None:
    return None if text is None else printable_line(text)


def _host_of(name: str) -> str:
    """Return the host of HOST/PROCESS; a member that reported no place has its id as its host."""
    return name.rpartition("/")[0] or name


@dataclass(frozen=True, slots=True)
class StepPart:
    """A part of a step. ``name`` is the ledger's field without the unit, ``title`` is for
    display."""

    name: str
    title: str
    meaning: str
    is_waiting: bool = True


STEP_PARTS = (
    StepPart("compute", "compute", "the program computes between two batches", False),
    StepPart("dataset", "dataset", "waiting for the dataset to read samples"),
    StepPart("collate", "collate", "waiting for samples to be collated"),
    StepPart("prefix", "prefix", "waiting for the model operations that workers run"),
    StepPart("worker", "free worker", "waiting for a free worker"),
    StepPart("wire", "wire", "waiting for the transfer of a batch"),
    StepPart("device", "device copy", "waiting for the copy to the device"),
    StepPart("order", "order", "waiting for its turn while a later batch is ready"),
    StepPart("ranks", "other ranks", "waiting for other ranks that take the same steps"),
    StepPart("loader", "loader", "the loader's work in the trainer", False),
)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The seconds of each part and the number of steps, since a trainer's start."""

    steps: int
    seconds: dict[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def since(self, before: Ledger | None) -> Ledger:
        """Return the difference to ``before``; the whole ledger if ``before`` is None or another
        trainer's."""
        if before is None or before.steps > self.steps:
            return self
        parts = {
            name: max(0.0, s - before.seconds.get(name, 0.0)) for name, s in self.seconds.items()
        }
        return Ledger(self.steps - before.steps, parts)

    def shares(self) -> dict[str, float]:
        """Return the share of each part; empty for a ledger without time."""
        total = self.total_s
        return {name: s / total for name, s in self.seconds.items()} if total > 0 else {}


def ledger_of(trainer: Mapping[str, Any]) -> Ledger | None:
    """Return the ledger; None for a trainer that reports none or has not taken a step."""
    fields = trainer.get("ledger")
    if not isinstance(fields, dict) or not fields.get("steps"):
        return None
    parts = {part.name: float(fields.get(f"{part.name}_s") or 0.0) for part in STEP_PARTS}
    return Ledger(int(fields["steps"]), parts)


@dataclass(frozen=True, slots=True)
class PoolAddress:
    """A controller's endpoint, with the keys and the timeout of a request."""

    endpoint: str
    keys: str | None
    timeout_s: float


def ask_pool(address: PoolAddress) -> PoolView:
    """Ask the controller and block until it answers. Raises PenstockError, ValueError or
    OSError."""
    text = _pool.pool_status(address.endpoint, address.keys, address.timeout_s)
    fields: dict[str, Any] = json.loads(text)
    return pool_view(fields, time.time())


class StatusPoller:
    """Calls ``take`` with each status, and ``fail`` with a sentence if a request failed, both in
    its thread. At most one request is in flight."""

    def __init__(
        self,
        address: PoolAddress,
        interval_s: float,
        take: Callable[[PoolView], None],
        fail: Callable[[str], None],
    ) -> None:
        self._address = address
        self._interval_s = interval_s
        self._take = take
        self._fail = fail
        self._condition = threading.Condition()
        self._is_closed = False
        self._is_poll_due = False
        self._thread = threading.Thread(target=self._run, name="penstock-status", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def poll_now(self) -> None:
        """Ask immediately."""
        with self._condition:
            self._is_poll_due = True
            self._condition.notify_all()

    def close(self) -> None:
        """End the thread, and wait for the request in flight, which has a time limit."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed:
            began = time.monotonic()
            try:
                view = ask_pool(self._address)
            except (PenstockError, ValueError, OSError) as error:
                self._fail(str(error))
            else:
                self._take(view)
            with self._condition:
                left = began + self._interval_s - time.monotonic()
                if left > 0:
                    self._condition.wait_for(lambda: self._is_closed or self._is_poll_due, left)
                self._is_poll_due = False
