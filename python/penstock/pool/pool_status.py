# SPDX-License-Identifier: Apache-2.0
"""A pool's settings and members as its controller sees them: for programs, and as text for people;
and the costs of its jobs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.pool.pool_log import printable_line, short_id

_NUMERICS = re.compile(r",? ?numerics (?P<kind>[0-9a-f]{8})")
_ABOUT = re.compile(
    r"(?P<host>[^,]+), process (?P<process>\d+(?:-\d+)?)(?:, (?P<software>.*))?", re.DOTALL
)

# By the name in the status: the limiting resource, which would have to grow for a faster job.
_LIMITS = {
    "unknown": "its bottleneck is not known yet",
    "trainer": "its trainer is the bottleneck",
    "workers": "its workers' CPUs are the bottleneck",
    "waiting": "its workers are the bottleneck: they wait, as for storage",
    "link": "the link to its workers is the bottleneck",
    "storage": "its storage is the bottleneck",
    "sampler": "its sampler is the bottleneck",
    "other": "more workers would not help",
}
_SILENT_SHOWN_S = 5.0  # of an engine's adapter, which reports each second
_IDLE_SHOWN_S = 60.0  # a job without requests for longer is only counted
_UNKNOWN = "unknown"
_COST_HEADS = (
    "worker h", "CPU h", "bytes", "batches", "samples", "energy", "GPU energy", "money",
    "gCO2",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The response of `penstock status --json`; csrc/controller/pool_status.h has its fields."""

    fields: dict[str, Any]

    def find_worker(self, wanted: str) -> dict[str, Any]:
        """Return the only worker with this name or id prefix. Raise ValueError if there is none, or
        more than one."""
        workers: list[dict[str, Any]] = self.fields["workers"]
        found = [
            worker
            for worker in workers
            if wanted and (name_of(worker) == wanted or worker["id"].startswith(wanted.lower()))
        ]
        if len(found) != 1:
            there = ", ".join(f"{name_of(worker)} ({worker['id']})" for worker in found or workers)
            seen = f"{len(found)} workers have" if found else "no worker has"
            raise ValueError(
                f"{seen} the name or id prefix {wanted!r}; workers: {there or 'none'}. Pass a "
                f"name or a unique id prefix"
            )
        return found[0]


def name_of(member: dict[str, Any]) -> str:
    """Return a display name for a worker or a trainer: its host and process, and its number if its
    process has several."""
    about = _ABOUT.fullmatch(printable_line(member["about"]))
    return f"{about['host']}/{about['process']}" if about else short_id(member["id"])


def software_of(member: dict[str, Any]) -> str:
    """Return the versions that a worker or a trainer runs; "" if it did not report them."""
    about = _ABOUT.fullmatch(printable_line(member["about"]))
    return _NUMERICS.sub("", about["software"] or "") if about else ""


def format_numerics() -> str:
    """Return the kind of this process's kernels for its self-description: processes of the same
    kind compute identical bits."""
    from penstock import _C  # loads torch

    return f"numerics {_C.numeric_fingerprint()[-1]:016x}"[:17]


def numerics_of(member: dict[str, Any]) -> str | None:
    """Return the kind of a worker's or trainer's kernels, as :func:`format_numerics` formats it."""
    found = _NUMERICS.search(printable_line(member["about"]))
    return None if found is None else found["kind"]


def format_spent(spent: float | None, budget: float | None) -> str:
    """Format an engine's expenses: "; 1.20 of 5 spent". "" without a price."""
    of = "" if budget is None else f" of {budget:g}"
    return "" if spent is None else f"; {spent:.2f}{of} spent"


def status_text(status: PoolStatus, *, with_idle: bool = False) -> str:
    """Format a status for people: a table of the workers, a table of the jobs that they work for,
    and notes on problems. ``with_idle`` includes jobs without recent requests."""
    return "\n".join(_Page(status.fields, with_idle).lines())


class _Page:
    def __init__(self, fields: dict[str, Any], with_idle: bool) -> None:
        self._controller = fields["controller"]
        self._engine = fields["engine"]
        self._workers = fields["workers"]
        self._trainers = {trainer["id"]: trainer for trainer in fields["trainers"]}
        self._shown = [
            trainer
            for trainer in self._trainers.values()
            if with_idle or trainer["idle_s"] < _IDLE_SHOWN_S
        ]

    def lines(self) -> Iterator[str]:
        controller = self._controller
        state = "" if controller["is_settled"] else "; starting, no workers are assigned yet"
        yield f"controller {short_id(controller['id'])} at {controller['endpoint']}{state}"
        if self._engine is not None:
            yield from self._engine_lines(self._engine)
        yield ""
        yield from self._worker_lines()
        yield from self._kept_lines()
        yield ""
        yield from self._job_lines()
        for more in (self._demand_lines(), self._notes()):
            if lines := [*more]:
                yield from ["", *lines]

    def _engine_lines(self, engine: dict[str, Any]) -> Iterator[str]:
        name = printable_line(engine["name"])
        silent_s = engine["since_report_s"]
        if silent_s > _SILENT_SHOWN_S:
            yield f"engine {name}: its adapter has not reported for {silent_s:.0f} s (penstock up)"
            return
        counts = [
            f"{engine[what]} {word}"
            for what, word in (
                ("running", "running"),
                ("starting", "starting"),
                ("stopping", "stopping"),
            )
            if engine[what] or what == "running"
        ]
        money = format_spent(engine["spent"], engine["budget"])
        bounds = f"{engine['workers_min']} to {engine['workers_max']}"
        yield (
            f"engine {name}: {', '.join(counts)}, {engine['wanted']} wanted ({bounds}){money}; "
            f"{printable_line(engine['reason'])}"
        )
        if engine["refusal"] is not None:
            last = printable_line(engine["refusal"])
            yield f"engine {name} has refused {engine['refusals']} times, last: {last}"
        if engine["trouble"] is not None:
            yield f"engine {name}: {printable_line(engine['trouble'])}"

    def _worker_lines(self) -> Iterator[str]:
        rows = [
            (
                _with_owner(name_of(worker), worker["machine"]),
                short_id(worker["id"]),
                worker["endpoint"],
                self._work_of(worker),
            )
            for worker in self._workers
        ]
        yield from _table(("worker", "id", "address", "works for"), rows)

    def _kept_lines(self) -> Iterator[str]:
        kept_bytes = sum(worker["kept_bytes"] for worker in self._workers)
        answers = sum(worker["kept_answers"] for worker in self._workers)
        if kept_bytes or answers:
            size = f"{kept_bytes / 1e6:,.1f} MB of batches"
            yield f"{size} are kept; {answers:,} {'was' if answers == 1 else 'were'} not made again"

    def _work_of(self, worker: dict[str, Any]) -> str:
        trainer_id = worker["trainer"] or worker["assigned_to"]
        work = "no job" if trainer_id is None else self._job_of(trainer_id)
        if worker["stuck_s"] is not None:
            work = f"stuck for {worker['stuck_s']:.0f} s at a batch that is no longer needed"
        if worker["is_draining"]:
            return f"{work}; draining"
        return f"{work}; moving to another job" if worker["is_withdrawn"] else work

    def _job_of(self, trainer_id: str) -> str:
        """Return the display name of a job. Two jobs of one name run in different processes."""
        trainer = self._trainers.get(trainer_id)
        if trainer is None:
            return f"trainer {short_id(trainer_id)}, which has left"
        return f"{printable_line(trainer['job'])} of {name_of(trainer)}"

    def _job_lines(self) -> Iterator[str]:
        heads = (
            "job", "trainer", "id", "workers", "batches/s", "waits", "delivered", "ready", "asked",
            "in flight",
        )  # fmt: skip
        if self._shown or not self._trainers:
            yield from _table(heads, [self._job_row(trainer) for trainer in self._shown])
        if count := len(self._trainers) - len(self._shown):
            jobs, have = ("1 job", "has") if count == 1 else (f"{count} jobs", "have")
            yield f"{jobs} that {have} been idle for over {_IDLE_SHOWN_S:g} s: see --all"

    def _job_row(self, trainer: dict[str, Any]) -> tuple[str, ...]:
        queue = trainer["queue"]
        who = (self._name_of_job(trainer), name_of(trainer), short_id(trainer["id"]))
        delivered = f"{queue['delivered_batches']:,}"
        if trainer["workers_max"] == 0:
            return (*who, "-", f"idle for {trainer['idle_s']:.0f} s", "", delivered, "", "", "")
        return (
            *who,
            self._worker_count(trainer),
            _or_dash(trainer["batches_per_s"], "{:.1f}"),
            _or_dash(trainer["waited_share"], "{:.0%}"),
            delivered,
            str(queue["ready_batches"]),
            str(queue["asked_batches"]),
            f"{queue['bytes_in_flight'] / 1e6:.1f} MB",
        )

    @staticmethod
    def _name_of_job(trainer: dict[str, Any]) -> str:
        job = printable_line(trainer["job"])
        if trainer["world_size"] > 1:
            job += f", rank {trainer['rank']} of {trainer['world_size']}"
        return _with_owner(job, trainer["user"])

    def _worker_count(self, trainer: dict[str, Any]) -> str:
        count, most = trainer["workers"], trainer["workers_max"]
        # The maximal useful number is of interest only if it is less than the number of workers.
        return f"{count} of {most}" if most < len(self._workers) else str(count)

    def _demand_lines(self) -> Iterator[str]:
        """Yield a line per measured job: how many workers it can use, its bottleneck, and why."""
        for trainer in self._shown:
            if trainer["workers_max"] == 0 or trainer["step_s"] is None:
                continue
            wanted = trainer["workers_wanted"]
            has_use = f"can use {wanted} worker{'' if wanted == 1 else 's'}"
            limit = _LIMITS[trainer["limited_by"]]
            yield f"{self._job_of(trainer['id'])} {has_use}, and {limit}: {trainer['reason']}"

    def _notes(self) -> Iterator[str]:
        if trouble := self._controller["policy_trouble"]:
            reason = printable_line(trouble)
            yield f"workers are distributed evenly, since the policy failed: {reason}"
        if trouble := self._controller["key_trouble"]:
            yield (
                "the controller cannot read its keys again, and uses the previous ones: "
                + printable_line(trouble)
            )
        for offence in self._controller["offences"]:
            times = "once" if offence["count"] == 1 else f"{offence['count']} times"
            last = f"last {offence['since_s']:.0f} s ago"
            yield f"refused {times}, {last}: {printable_line(offence['text'])}"
        for trainer in self._shown:
            if trainer["workers_max"] > 0 and trainer["workers"] == 0:
                yield f"{self._job_of(trainer['id'])} has no worker: {self._shortage(trainer)}"
        for worker in self._workers:
            unfit_for = [one for one in worker["unfit_for"] if one in self._trainers]
            if unfit_for:
                # The worker reports the reason only for the last trainer that it refused.
                is_last = worker["unfit_for"][-1] == unfit_for[-1]
                reason = f": {printable_line(worker['unfit_reason'] or '')}" if is_last else ""
                jobs = ", ".join(self._job_of(trainer_id) for trainer_id in unfit_for)
                yield f"{name_of(worker)} cannot run {jobs}{reason}"
        software: dict[str, list[str]] = {}
        for worker in self._workers:
            software.setdefault(software_of(worker), []).append(name_of(worker))
        if len(software) > 1:
            for versions, names in sorted(software.items(), key=lambda item: len(item[1])):
                verb = "runs" if len(names) == 1 else "run"
                yield f"{_few(names)} {verb} {versions or 'unknown versions'}"

        yield from self._kinds()

    def _kinds(self) -> Iterator[str]:
        """Report workers whose kernels compute other bits than other workers or their trainer."""
        kinds: dict[str, list[str]] = {}
        for worker in self._workers:
            if kind := numerics_of(worker):
                kinds.setdefault(kind, []).append(name_of(worker))
        if len(kinds) > 1:
            named = "; ".join(
                f"{_few(names)} ({kind})"
                for kind, names in sorted(kinds.items(), key=lambda item: len(item[1]))
            )
            yield f"the workers' kernels are of {len(kinds)} kinds, by their last bits: {named}"
        for trainer in self._shown:
            own = numerics_of(trainer)
            apart = [
                name_of(worker)
                for worker in self._workers
                if own
                and trainer["id"] in (worker["trainer"], worker["assigned_to"])
                and numerics_of(worker) not in (own, None)
            ]
            if apart:
                verb = "runs" if len(apart) == 1 else "run"
                yield (
                    f"{_few(apart)} {verb} only the exact part of the calls that a model of "
                    f"{self._job_of(trainer['id'])} has moved: kernels there differ from the "
                    f"trainer's ({own}) in the last bits"
                )

    def _shortage(self, trainer: dict[str, Any]) -> str:
        staying = [one for one in self._workers if not one["is_draining"]]
        able = [one for one in staying if one["stuck_s"] is None]
        unfit = [one for one in able if trainer["id"] in one["unfit_for"]]
        if not self._controller["is_settled"]:
            return "the controller assigns no workers yet"
        if not staying:
            return "the pool has no workers"
        if not able:
            return "all are stuck at batches no longer needed, and are replaced if this lasts"
        if len(unfit) == len(able):
            return "no worker of the pool can run it"
        return "the workers serve other jobs, or are about to start"


def _with_owner(name: str, owner: str | None) -> str:
    """Append the user or the machine whose key a job or a worker has, if that key has one."""
    return name if owner is None else f"{name} ({printable_line(owner)})"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield aligned lines, or a single line if there are no rows."""
    if not rows:
        yield f"no {heads[0]}s"
        return
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    for row in (heads, *rows):
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(padded).rstrip()


def cost_text(fields: dict[str, Any]) -> str:
    """Format the fields of `penstock costs --json`, which csrc/controller/pool_status.h describes:
    one line per job, and the same per 1,000 samples. Missing values are shown as unknown."""
    return "\n".join(_cost_lines(fields))


def _cost_lines(fields: dict[str, Any]) -> Iterator[str]:
    jobs = fields["jobs"]
    rows = [(*_name_cells(job), *_cost_cells(job["total"])) for job in jobs]
    yield from _table(("job", "trainer", "state", *_COST_HEADS), rows)
    per_sample = [
        (*_name_cells(job), *_cost_cells(job["per_1000_samples"], is_share=True))
        for job in jobs
        if job["per_1000_samples"] is not None
    ]
    if per_sample:
        yield ""
        yield "per 1,000 samples:"
        yield from _table(("job", "trainer", "state", *_COST_HEADS), per_sample)
    if notes := [*_cost_notes(fields)]:
        yield ""
        yield from notes


def _job(job: dict[str, Any]) -> str:
    return _with_owner(printable_line(job["job"]), job["user"])


def _trainer(job: dict[str, Any]) -> str:
    return name_of({"about": job["about"], "id": ""}) or "-"


def _name_cells(job: dict[str, Any]) -> tuple[str, str, str]:
    state = "running" if job["is_running"] else f"ended {_ago(job['since_report_s'])} ago"
    return _job(job), _trainer(job), state


def _ago(time_s: float) -> str:
    for unit, length_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if time_s >= length_s:
            return f"{time_s / length_s:.0f} {unit}"
    return f"{time_s:.0f} s"


def _cost_cells(bill: dict[str, Any], *, is_share: bool = False) -> tuple[str, ...]:
    whole = _amount if is_share else _count
    return (
        _amount(bill["worker_hours"]),
        _amount(bill["cpu_hours"]),
        _with_unit(bill["bytes"], "B"),
        whole(bill["batches"]),
        whole(bill["samples"]),
        _with_unit(bill["energy_j"], "J"),
        _with_unit(bill["gpu_energy_j"], "J"),
        _amount(bill["money"]),
        _amount(bill["gco2"]),
    )


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _amount(value: float | None) -> str:
    """Format with four digits and without an exponent."""
    if value is None:
        return _UNKNOWN
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    places = 3
    while abs(value) < 10.0 ** (3 - places) and places < 12:
        places += 1
    return f"{value:.{places}f}"


def _with_unit(value: float | None, unit: str) -> str:
    if value is None:
        return _UNKNOWN
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.4g} {prefix}{unit}"
        value /= 1000
    return f"{value:,.4g} P{unit}"


def _cost_notes(fields: dict[str, Any]) -> Iterator[str]:
    factors = fields["factors"]
    for job in fields["jobs"]:
        count, metered = job["tenancies"], job["metered_tenancies"]
        if metered < count:
            known = _with_unit(job["metered_energy_j"], "J") if metered else "none"
            yield (
                f"energy of {_job(job)} of {_trainer(job)} is unknown: of {count} times that a "
                f"worker served it, the worker's host reported its energy in {metered} ({known})"
            )
    if fields["jobs"]:
        if factors["price_per_hour"] is None and factors["energy_price_per_kwh"] is None:
            yield "money is unknown: give --price-per-hour, --energy-price or both"
        if factors["gco2_per_kwh"] is None:
            yield "gCO2 is unknown: give --gco2-per-kwh"
    if count := fields["jobs_left_out"]:
        yield f"{count} more jobs are omitted: the controller's answer has no room for them"
    if count := fields["jobs_forgotten"]:
        yield f"{count} older jobs are no longer kept"
