# SPDX-License-Identifier: Apache-2.0
"""The metrics of a pool: their names, units and few labels, their counters, and their text form.

The metrics of a job have the labels `training_job` and `rank`, and `user` if its key is a user key;
the label `job` belongs to Prometheus. A trainer's id is not a label, since each start of a program
would leave a series behind.

Counters are summed by user, job and rank from the first status on, so they never shrink when a
trainer leaves. Their number is bounded. At the limit, the user with the most series loses an ended
one, the one with the fewest batches, so no user loses series to another user's jobs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from penstock._version import __version__
from penstock.live.pool_view import STEP_PARTS, WORKER_STATES, EngineView, PoolView, TrainerView

EVENT_KINDS = (
    "worker_joined", "worker_died", "worker_left", "trainer_joined", "trainer_left", "assigned",
    "hedged", "replanned", "scaled",
)  # fmt: skip
SERIES_MAX = 256  # by user, job and rank; further ones count as OTHER
PLAIN_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def pool_metrics(
    view: PoolView, totals: PoolTotals, event_counts: Mapping[str, int], now: float
) -> list[Metric]:
    """Return the metrics in the order of the page."""
    return [
        Metric("penstock_build", "info", "version of penstock", [_plain(1, version=__version__)]),
        _gauge(
            "penstock_status_age_seconds", "time since the controller's last status", now - view.at
        ),
        _gauge(
            "penstock_controller_settled",
            "whether the controller assigns workers",
            float(view.is_settled),
        ),
        *_worker_metrics(view),
        *_trainer_gauges(view, totals),
        *_counters(totals),
        _event_metric(event_counts),
        *(_engine_metrics(view.engine) if view.engine is not None else []),
    ]


def _worker_metrics(view: PoolView) -> list[Metric]:
    pool = view.totals()
    by_state = pool["workers_by_state"]
    return [
        Metric(
            "penstock_workers",
            "gauge",
            "workers of the pool by state",
            [_plain(by_state[state], state=state) for state in WORKER_STATES],
        ),
        _gauge(
            "penstock_workers_wanted",
            "workers that the jobs can use",
            pool["workers_wanted"],
        ),
        _gauge(
            "penstock_kept_bytes",
            "memory of the batches that are kept for further requests",
            pool["kept_bytes"],
        ),
        _gauge(
            "penstock_kept_answers",
            "batches that the current workers did not have to make, as they were kept",
            pool["kept_answers"],
        ),
        Metric(
            "penstock_trainers",
            "gauge",
            "ranks of jobs by whether they request batches",
            [
                _plain(pool["trainers"] - pool["trainers_idle"], state="asking"),
                _plain(pool["trainers_idle"], state="idle"),
            ],
        ),
        _gauge(
            "penstock_members_left_out",
            "workers and trainers omitted from the status for lack of room",
            view.left_out,
        ),
    ]


def _trainer_gauges(view: PoolView, totals: PoolTotals) -> list[Metric]:
    """Sum over the trainers with the same user, job and rank; two programs of one name share a
    series."""
    by_key: dict[SeriesKey, list[TrainerView]] = {}
    for trainer in view.trainers:
        by_key.setdefault(totals.key(trainer), []).append(trainer)

    def sums(name: str, help: str, value: Callable[[TrainerView], float]) -> Metric:
        samples = [_of(key, sum(map(value, ranks))) for key, ranks in by_key.items()]
        return Metric(name, "gauge", help, samples)

    return [
        sums("penstock_job_workers", "workers assigned to a rank", lambda one: one.workers),
        sums(
            "penstock_job_workers_wanted",
            "workers that a rank can use",
            lambda one: 0 if one.is_idle else one.workers_wanted,
        ),
        sums(
            "penstock_job_ready_batches", "batches ready for a rank", lambda one: one.ready_batches
        ),
        sums(
            "penstock_job_asked_batches",
            "batches requested by a rank",
            lambda one: one.asked_batches,
        ),
        sums(
            "penstock_job_in_flight_bytes",
            "bytes of batches in transit",
            lambda one: one.bytes_in_flight,
        ),
    ]


def _counters(totals: PoolTotals) -> list[Metric]:
    by_key = totals.totals()
    steps = [(key, one) for key, one in by_key.items() if one.parts_s]
    return [
        Metric(
            "penstock_job_batches",
            "counter",
            "batches delivered to a rank",
            [_of(key, one.batches) for key, one in by_key.items()],
        ),
        Metric(
            "penstock_job_batch_bytes",
            "counter",
            "bytes of delivered batches, by their mean size at the time",
            [_of(key, one.bytes) for key, one in by_key.items()],
        ),
        Metric(
            "penstock_job_waited_seconds",
            "counter",
            "time that a rank waited for batches",
            [_of(key, one.waited_s) for key, one in by_key.items()],
        ),
        Metric(
            "penstock_job_hedged_batches",
            "counter",
            "late batches also requested from a second worker",
            [_of(key, one.hedged) for key, one in by_key.items()],
        ),
        Metric(
            "penstock_job_steps",
            "counter",
            "steps of ranks that report a time breakdown",
            [_of(key, one.steps) for key, one in steps],
        ),
        Metric(
            "penstock_job_step_seconds",
            "counter",
            "time of steps, by the part in which each second was spent",
            [
                _of(key, one.parts_s[part.name], part=part.name)
                for key, one in steps
                for part in STEP_PARTS
            ],
        ),
    ]


def _event_metric(counts: Mapping[str, int]) -> Metric:
    known = Counter({kind: counts.get(kind, 0) for kind in EVENT_KINDS})
    known["other"] = sum(count for kind, count in counts.items() if kind not in EVENT_KINDS)
    help_text = "events of the pool by kind"
    samples = [_plain(count, kind=kind) for kind, count in known.items()]
    return Metric("penstock_events", "counter", help_text, samples)


def _engine_metrics(engine: EngineView) -> Sequence[Metric]:
    states = {
        "running": engine.running,
        "starting": engine.starting,
        "stopping": engine.stopping,
    }
    metrics = [
        Metric(
            "penstock_engine_workers",
            "gauge",
            "workers of the engine by state",
            [_plain(count, engine=engine.name, state=state) for state, count in states.items()],
        ),
        _gauge(
            "penstock_engine_workers_wanted",
            "number of workers that the engine should run",
            engine.wanted,
        ),
        _gauge(
            "penstock_engine_workers_max",
            "maximum number of workers of the engine",
            engine.workers_max,
        ),
        _gauge(
            "penstock_engine_silent_seconds",
            "time since the engine's last report",
            engine.since_report_s,
        ),
        Metric(
            "penstock_engine_refusals",
            "counter",
            "requests for workers that the engine refused",
            [_plain(engine.refusals)],
        ),
    ]
    if engine.spent is not None:
        text = "cost of the workers so far, in the unit of the price"
        metrics.append(_gauge("penstock_engine_spent", text, engine.spent))
    if engine.budget is not None:
        text = "cost limit of the workers, in the unit of the price"
        metrics.append(_gauge("penstock_engine_budget", text, engine.budget))
    return metrics


def _gauge(name: str, help: str, value: float) -> Metric:
    return Metric(name, "gauge", help, [_plain(value)])


def _plain(value: float, **labels: str) -> Sample:
    return Sample(value, labels)


def _of(key: SeriesKey, value: float, **labels: str) -> Sample:
    user = {"user": key.user} if key.user else {}
    return Sample(value, {"training_job": key.job, "rank": key.rank, **user, **labels})


class SeriesKey(NamedTuple):
    """The labels of a series; the user is empty for trainers with the role's key."""

    user: str
    job: str
    rank: str


OTHER = "other"
OTHERS = SeriesKey("", OTHER, OTHER)


@dataclass(slots=True)
class RankTotals:
    """The sums of a series. ``parts_s`` is keyed by step part, and empty if a trainer has no
    ledger."""

    batches: float = 0.0
    bytes: float = 0.0
    waited_s: float = 0.0
    hedged: float = 0.0
    steps: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)


class PoolTotals:
    """Confined to the thread that takes the statuses."""

    def __init__(self) -> None:
        self._totals: dict[SeriesKey, RankTotals] = {}
        self._last: dict[str, TrainerView] = {}

    def add(self, view: PoolView) -> None:
        """Add a status. A new trainer counts with all its numbers since its start."""
        self._make_room(view)
        for trainer in view.trainers:
            last = self._last.get(trainer.id)
            totals = self._totals.setdefault(self.key(trainer), RankTotals())
            before = 0 if last is None else last.delivered_batches
            new_batches = max(0, trainer.delivered_batches - before)
            totals.batches += new_batches
            totals.bytes += new_batches * (trainer.batch_bytes or 0)
            waited_before = 0.0 if last is None else last.waited_s
            totals.waited_s += max(0.0, trainer.waited_s - waited_before)
            hedged_before = 0 if last is None else last.hedged_batches
            totals.hedged += max(0, trainer.hedged_batches - hedged_before)
            if trainer.ledger is not None:
                new = trainer.ledger.since(None if last is None else last.ledger)
                totals.steps += new.steps
                for part in STEP_PARTS:
                    known = totals.parts_s.get(part.name, 0.0)
                    totals.parts_s[part.name] = known + new.seconds.get(part.name, 0.0)
        self._last = {trainer.id: trainer for trainer in view.trainers}

    def key(self, trainer: TrainerView) -> SeriesKey:
        """Return the labels under which this trainer is counted."""
        key = _own_key(trainer)
        return key if key in self._totals or self._count < SERIES_MAX else OTHERS

    def totals(self) -> Mapping[SeriesKey, RankTotals]:
        """Return the live mapping; the next add() changes it."""
        return self._totals

    @property
    def _count(self) -> int:
        return len(self._totals) - (OTHERS in self._totals)

    def _make_room(self, view: PoolView) -> None:
        """Give the view's new series a place, as far as users with more series can give one up.

        If a new series' user already has as many as any other user, only that user's ended jobs
        make room.
        """
        present = dict.fromkeys(_own_key(trainer) for trainer in view.trainers)
        counts = Counter(key.user for key in self._totals if key != OTHERS)
        by_batches = sorted(
            (key for key in self._totals if key != OTHERS),
            key=lambda key: (key in present, self._totals[key].batches),
            reverse=True,
        )
        leaving: dict[str, list[SeriesKey]] = {}  # by user; the next series to drop is last
        for key in by_batches:
            leaving.setdefault(key.user, []).append(key)
        seen: Counter[str] = Counter()
        turns: list[tuple[int, SeriesKey]] = []  # all users' first series, then their second ones
        for key in present:
            turns.append((seen[key.user], key))
            seen[key.user] += 1
        for _, key in sorted(turns, key=lambda turn: turn[0]):
            if key in self._totals:
                continue
            if self._count >= SERIES_MAX:
                most, count = counts.most_common(1)[0]
                if counts[key.user] >= count:
                    most = key.user
                victims = leaving.get(most, [])
                if not victims or (most == key.user and victims[-1] in present):
                    continue
                del self._totals[victims.pop()]
                counts[most] -= 1
            self._totals[key] = RankTotals()
            counts[key.user] += 1


def _own_key(trainer: TrainerView) -> SeriesKey:
    return SeriesKey(trainer.user or "", trainer.job, str(trainer.rank))


@dataclass(frozen=True, slots=True)
class Sample:
    value: float
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. A counter's ``name`` lacks the suffix _total, which its samples have. An info is a
    gauge of 1 whose name ends in _info in the samples."""

    name: str
    kind: Literal["counter", "gauge", "info"]
    help: str
    samples: Sequence[Sample]


def exposition(metrics: Sequence[Metric], *, is_open: bool) -> str:
    """Return the text form: OpenMetrics if ``is_open``, else Prometheus' text format."""
    lines = [line for metric in metrics for line in _lines(metric, is_open)]
    if is_open:
        lines.append("# EOF")
    return "".join(f"{line}\n" for line in lines)


def wants_open_metrics(accept: str) -> bool:
    """Return whether a request's Accept header prefers OpenMetrics to plain text."""
    quality = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for entry in accept.split(","):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        if kind not in quality:
            continue
        given = [p[2:] for p in parameters if p.startswith("q=")]
        try:
            value = float(given[0]) if given else 1.0
        except ValueError:
            value = 0.0
        quality[kind] = max(quality[kind], value)
    return quality["application/openmetrics-text"] > quality["text/plain"]


def _lines(metric: Metric, is_open: bool) -> Iterator[str]:
    ending = {"counter": "_total", "gauge": "", "info": "_info"}[metric.kind]
    sample_name = f"{metric.name}{ending}"
    name = metric.name if is_open else sample_name
    kind = "gauge" if metric.kind == "info" and not is_open else metric.kind
    yield f"# HELP {name} {_escaped_help(metric.help, is_open)}"
    yield f"# TYPE {name} {kind}"
    unit = next((u for u in ("seconds", "bytes") if metric.name.endswith(f"_{u}")), None)
    if is_open and unit is not None and metric.kind != "info":
        yield f"# UNIT {name} {unit}"
    for sample in metric.samples:
        pairs = ",".join(f'{key}="{_escaped(value)}"' for key, value in sample.labels.items())
        yield f"{sample_name}{'{' + pairs + '}' if pairs else ''} {_number(sample.value)}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _escaped_help(text: str, is_open: bool) -> str:
    return _escaped(text) if is_open else text.replace("\\", r"\\").replace("\n", r"\n")
