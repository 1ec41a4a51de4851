# SPDX-License-Identifier: Apache-2.0
"""The sentences and tables of a plan for people."""

from __future__ import annotations

import dataclasses

from penstock.graph.plan_record import (
    CutTotals,
    PlanRecord,
    RunningPrice,
    format_plan,
    format_price,
)

PRICE = RunningPrice(
    times=7,
    changes=2,
    trainer_s=0.004,
    worker_s=0.006,
    worker_count=3,
    link_s=0.0,
    step_s=0.005,
    is_held=False,
)


def test_running_price_lists_times_per_stage() -> None:
    assert format_price(PRICE) == (
        "Priced 7 times from the running loader, changed 2 times: a step takes 5 ms, the "
        "trainer 4 ms, one of 3 workers 6 ms."
    )


def test_running_price_includes_link_time() -> None:
    text = format_price(dataclasses.replace(PRICE, link_s=0.0071))
    assert text.endswith("one of 3 workers 6 ms, the link 7.1 ms.")


def test_pool_plan_lists_bytes_sent() -> None:
    totals = (
        CutTotals("none", 0.0, 0.002, 3_000, 3_000),
        CutTotals("maximal", 0.001, 0.0, 12_000, 12_000),
        CutTotals("chosen", 0.0, 0.002, 3_000, 3_000),
    )
    text = format_plan(PlanRecord(totals=totals, link_bytes_per_s=125e6))
    assert "bytes sent" in text
    assert "everything that can move      1.000       0.000      12,000      12,000" in text
    assert "at 125 MB/s when the plan was made" in " ".join(text.split())
    assert "bytes sent" not in format_plan(PlanRecord(totals=totals))


def test_running_price_reports_reverted_change() -> None:
    held = dataclasses.replace(PRICE, changes=1, worker_count=1, is_held=True)
    text = format_price(held)
    assert "changed once: " in text
    assert ", one of 1 worker " in text
    assert text.endswith(" A change that made steps longer was reverted.")
