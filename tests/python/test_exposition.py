# SPDX-License-Identifier: Apache-2.0
"""Prometheus' parsers read the metrics text, which has conventional names and units."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_plain
from shown_pools import busy_pool, busy_status, ledger, status, trainer

from penstock.live.pool_metrics import (
    EVENT_KINDS,
    OTHER,
    SERIES_MAX,
    Metric,
    PoolTotals,
    Sample,
    exposition,
    pool_metrics,
    wants_open_metrics,
)
from penstock.live.pool_view import PoolView, pool_view

NOW = 1_800_000_003.0


def page(*views: PoolView, is_open: bool = False) -> str:
    totals = PoolTotals()
    for view in views:
        totals.add(view)
    metrics = pool_metrics(views[-1], totals, Counter(worker_died=2, unheard_of=1), NOW)
    return exposition(metrics, is_open=is_open)


def samples(families: Iterable[Any]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in families:
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def test_both_formats_parse_to_the_same_samples() -> None:
    plain = samples(parse_plain(page(busy_pool())))
    opened = samples(parse_open(page(busy_pool(), is_open=True)))
    assert plain == opened
    labels = (("rank", "0"), ("training_job", "train.py: Images"))
    assert plain["penstock_job_batches_total", labels] == 12345
    assert plain["penstock_job_batch_bytes_total", labels] == 12345e6
    assert plain["penstock_job_waited_seconds_total", labels] == 1.25
    part = (("part", "dataset"), *labels)
    assert plain["penstock_job_step_seconds_total", part] == 0.5
    assert plain["penstock_workers", (("state", "draining"),)] == 1
    assert plain["penstock_events_total", (("kind", "worker_died"),)] == 2
    assert plain["penstock_events_total", (("kind", "other"),)] == 1
    assert plain["penstock_engine_workers_wanted", ()] == 6
    assert plain["penstock_status_age_seconds", ()] == 3.0


def test_metrics_follow_the_naming_conventions() -> None:
    for family in parse_open(page(busy_pool(), is_open=True)):
        assert re.fullmatch(r"penstock_[a-z_]+", family.name)
        assert family.documentation
        assert family.type in ("counter", "gauge", "info")
        assert not re.search(r"milli|micro|kilo|mega|_ms\b|_s\b", family.name)
        if re.search("seconds|bytes", family.name):
            assert family.unit in ("seconds", "bytes") and family.name.endswith(family.unit)
        for sample in family.samples:
            assert not {"job", "instance"} & set(sample.labels), "labels of Prometheus' own"


def test_label_and_help_texts_are_escaped() -> None:
    names = ['a"b', "a\\b", "a\nb", "写真", ""]
    text = exposition(
        [
            Metric(
                "penstock_x", "gauge", 'a "help"\nof\\lines', [Sample(1, {"n": n}) for n in names]
            )
        ],
        is_open=False,
    )
    (family,) = parse_plain(text)
    assert [sample.labels["n"] for sample in family.samples] == names
    assert family.documentation == 'a "help"\nof\\lines'


@pytest.mark.parametrize(
    ("value", "shown"),
    [(3.0, "3"), (0.1, "0.1"), (1e18, "1e+18"), (float("inf"), "+Inf"), (float("nan"), "NaN")],
)
def test_values_are_printed_exactly(value: float, shown: str) -> None:
    text = exposition([Metric("penstock_x", "gauge", "x", [Sample(value, {})])], is_open=False)
    assert text.splitlines()[-1] == f"penstock_x {shown}"


@pytest.mark.parametrize(
    ("accept", "is_open"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain;version=0.0.4;q=0.5,*/*;q=0.1", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.3,*/*;q=0.2", True),
        ("application/openmetrics-text;q=0.2,text/plain;q=0.3", False),
        ("application/openmetrics-text;q=none", False),
        ("application/vnd.google.protobuf;q=0.9,application/openmetrics-text;q=0.5", True),
    ],
)
def test_format_follows_the_accept_header(accept: str, is_open: bool) -> None:
    assert wants_open_metrics(accept) == is_open


def test_counters_never_decrease_when_a_trainer_is_replaced() -> None:
    def delivered(number: int, count: int) -> PoolView:
        one = trainer(number, hedged_batches=count // 10, ledger=ledger(count, compute=count / 100))
        one["queue"] |= {"delivered_batches": count, "waited_s": count / 1000}
        return pool_view(status([], [one]), NOW)

    views = [delivered(1, 100), delivered(1, 150), pool_view(status([], []), NOW), delivered(2, 30)]
    seen: list[dict[str, float]] = []
    for count in range(1, len(views) + 1):
        found = samples(parse_plain(page(*views[:count])))
        seen.append({key[0] + str(dict(key[1]).get("part", "")): v for key, v in found.items()})
    for name, values in {
        "penstock_job_batches_total": [100, 150, 150, 180],
        "penstock_job_hedged_batches_total": [10, 15, 15, 18],
        "penstock_job_steps_total": [100, 150, 150, 180],
        "penstock_job_step_seconds_totalcompute": [1.0, 1.5, 1.5, 1.8],
        "penstock_job_waited_seconds_total": [0.1, 0.15, 0.15, 0.18],
    }.items():
        assert [one[name] for one in seen] == pytest.approx(values), name


def test_number_of_series_is_bounded() -> None:
    trainers = [trainer(n, id=f"{n:016x}", job=f"job {n}") for n in range(SERIES_MAX + 50)]
    found = samples(parse_plain(page(pool_view(status([], trainers), NOW))))
    jobs = {dict(labels).get("training_job") for name, labels in found if "job_batches" in name}
    assert len(jobs) == SERIES_MAX + 1 and OTHER in jobs
    labels = (("rank", OTHER), ("training_job", OTHER))
    assert found["penstock_job_batches_total", labels] == 50 * 12345


def made_up(user: str, first: int, count: int) -> list[dict[str, Any]]:
    return [
        trainer(n, id=f"{n:016x}", job=f"job {n}", user=user) for n in range(first, first + count)
    ]


def users_of(totals: PoolTotals) -> Counter[str]:
    return Counter(key.user for key in totals.totals() if key.job != OTHER)


def test_user_with_thousands_of_jobs_takes_no_series_of_others() -> None:
    totals = PoolTotals()
    totals.add(pool_view(status([], made_up("ann", 0, 3)), NOW))
    for round in range(5):
        flood = made_up("mallory", 1000 * (round + 1), 400)
        totals.add(pool_view(status([], flood), NOW))
    assert users_of(totals) == {"ann": 3, "mallory": SERIES_MAX - 3}
    ben = made_up("ben", 9000, 2)
    view = pool_view(status([], [*flood, *ben]), NOW)
    totals.add(view)
    assert users_of(totals) == {"ann": 3, "ben": 2, "mallory": SERIES_MAX - 5}
    assert totals.key(view.trainers[-1]).user == "ben"
    totals.add(view)
    assert users_of(totals) == {"ann": 3, "ben": 2, "mallory": SERIES_MAX - 5}, "it stays so"


def test_every_user_has_a_series_in_the_first_status() -> None:
    totals = PoolTotals()
    trainers = [*made_up("mallory", 0, 400), *made_up("ann", 9000, 2)]
    totals.add(pool_view(status([], trainers), NOW))
    assert users_of(totals) == {"ann": 2, "mallory": SERIES_MAX - 2}


def test_ended_job_with_the_fewest_batches_is_dropped_first() -> None:
    def jobs(*numbers: int) -> PoolView:
        made = made_up("ann", 0, SERIES_MAX + 2)
        for number, one in enumerate(made):
            one["queue"] |= {"delivered_batches": 1 if number == 7 else 100 + number}
        return pool_view(status([], [made[number] for number in numbers]), NOW)

    totals = PoolTotals()
    totals.add(jobs(*range(SERIES_MAX)))
    totals.add(jobs(*range(SERIES_MAX + 1)))
    assert OTHER in {key.job for key in totals.totals()}, "all others go on"
    totals.add(jobs(SERIES_MAX + 1))
    kept = {key.job for key in totals.totals()}
    assert f"job {SERIES_MAX + 1}" in kept and "job 7" not in kept
    assert len(kept) == SERIES_MAX + 1


def test_jobs_of_one_name_are_distinguished_by_user() -> None:
    trainers = [
        trainer(n, id=f"{n:016x}", job="train.py", user=user)
        for n, user in ((1, "ann"), (2, "ben"))
    ]
    found = samples(parse_plain(page(pool_view(status([], trainers), NOW))))
    for user in ("ann", "ben"):
        labels = (("rank", "0"), ("training_job", "train.py"), ("user", user))
        assert found["penstock_job_batches_total", labels] == 12345


def test_every_event_kind_has_a_series_from_the_start() -> None:
    found = samples(parse_plain(page(pool_view(busy_status(), NOW))))
    kinds = {dict(labels)["kind"] for name, labels in found if name == "penstock_events_total"}
    assert kinds == {*EVENT_KINDS, "other"}
