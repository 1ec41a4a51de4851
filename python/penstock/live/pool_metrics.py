# SPDX-License-Identifier: Apache-2.0
"""The metrics of a pool: their names, units and few labels. Pure.

`training_job` and `rank` are the labels of what belongs to a job, and `user` where its key is a
user's; Prometheus has a label `job` of its own. A trainer's id is no label, since each start of a
program would leave a series behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from penstock._version import __version__
from penstock.live.exposition import Metric, Sample
from penstock.live.pool_totals import PoolTotals, SeriesKey
from penstock.live.pool_view import WORKER_STATES, EngineView, PoolView, TrainerView
from penstock.live.step_parts import STEP_PARTS

EVENT_KINDS = (
    "worker_joined", "worker_died", "worker_left", "trainer_joined", "trainer_left", "assigned",
    "hedged", "replanned", "scaled",
)  # fmt: skip


def pool_metrics(
    view: PoolView, totals: PoolTotals, event_counts: Mapping[str, int], now: float
) -> list[Metric]:
    """In the order of the page."""
    return [
        Metric("penstock_build", "info", "version of penstock", [_plain(1, version=__version__)]),
        _gauge("penstock_status_age_seconds", "time since the controller's status", now - view.at),
        _gauge("penstock_controller_settled", "whether it assigns workers", float(view.is_settled)),
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
            "workers of the pool by what they do",
            [_plain(by_state[state], state=state) for state in WORKER_STATES],
        ),
        _gauge(
            "penstock_workers_wanted",
            "workers that the jobs have use for",
            pool["workers_wanted"],
        ),
        Metric(
            "penstock_trainers",
            "gauge",
            "ranks of jobs by whether they ask for batches",
            [
                _plain(pool["trainers"] - pool["trainers_idle"], state="asking"),
                _plain(pool["trainers_idle"], state="idle"),
            ],
        ),
        _gauge(
            "penstock_members_left_out",
            "workers and trainers that the status had no room for",
            view.left_out,
        ),
    ]


def _trainer_gauges(view: PoolView, totals: PoolTotals) -> list[Metric]:
    """Sums over a user's trainers of one job and rank; two programs of one name are one series."""
    by_key: dict[SeriesKey, list[TrainerView]] = {}
    for trainer in view.trainers:
        by_key.setdefault(totals.key(trainer), []).append(trainer)

    def sums(name: str, help: str, value: Callable[[TrainerView], float]) -> Metric:
        samples = [_of(key, sum(map(value, ranks))) for key, ranks in by_key.items()]
        return Metric(name, "gauge", help, samples)

    return [
        sums("penstock_job_workers", "workers that a rank has", lambda one: one.workers),
        sums(
            "penstock_job_workers_wanted",
            "workers that a rank has use for",
            lambda one: 0 if one.is_idle else one.workers_wanted,
        ),
        sums(
            "penstock_job_ready_batches", "batches that wait for it", lambda one: one.ready_batches
        ),
        sums("penstock_job_asked_batches", "batches it asked for", lambda one: one.asked_batches),
        sums(
            "penstock_job_in_flight_bytes",
            "bytes of the batches that are on their way",
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
            "batches that were delivered to a rank",
            [_of(key, one.batches) for key, one in by_key.items()],
        ),
        Metric(
            "penstock_job_batch_bytes",
            "counter",
            "bytes of those batches, by their mean size at the time",
            [_of(key, one.bytes) for key, one in by_key.items()],
        ),
        Metric(
            "penstock_job_waited_seconds",
            "counter",
            "time for which a rank waited for a batch",
            [_of(key, one.waited_s) for key, one in by_key.items()],
        ),
        Metric(
            "penstock_job_hedged_batches",
            "counter",
            "late batches that were asked of a second worker",
            [_of(key, one.hedged) for key, one in by_key.items()],
        ),
        Metric(
            "penstock_job_steps",
            "counter",
            "steps of ranks that report where their time goes",
            [_of(key, one.steps) for key, one in steps],
        ),
        Metric(
            "penstock_job_step_seconds",
            "counter",
            "time of steps, by the one place where each second went",
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
            "workers of the engine by what becomes of them",
            [_plain(count, engine=engine.name, state=state) for state, count in states.items()],
        ),
        _gauge("penstock_engine_workers_wanted", "workers it is to run", engine.wanted),
        _gauge("penstock_engine_workers_max", "the most workers it may run", engine.workers_max),
        _gauge("penstock_engine_silent_seconds", "since its last report", engine.since_report_s),
        Metric(
            "penstock_engine_refusals",
            "counter",
            "requests for workers that the engine did not grant",
            [_plain(engine.refusals)],
        ),
    ]
    if engine.spent is not None:
        text = "what its workers have cost, in the unit of the price"
        metrics.append(_gauge("penstock_engine_spent", text, engine.spent))
    if engine.budget is not None:
        text = "what its workers may cost, in the unit of the price"
        metrics.append(_gauge("penstock_engine_budget", text, engine.budget))
    return metrics


def _gauge(name: str, help: str, value: float) -> Metric:
    return Metric(name, "gauge", help, [_plain(value)])


def _plain(value: float, **labels: str) -> Sample:
    return Sample(value, labels)


def _of(key: SeriesKey, value: float, **labels: str) -> Sample:
    user = {"user": key.user} if key.user else {}
    return Sample(value, {"training_job": key.job, "rank": key.rank, **user, **labels})
