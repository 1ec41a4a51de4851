# SPDX-License-Identifier: Apache-2.0
"""Format the costs of a pool's jobs for people: one line per job, and the same per 1,000 samples.
Missing values are shown as unknown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.pool.pool_status import name_of, text_of
from penstock.pool.status_text import table

_UNKNOWN = "unknown"
_HEADS = (
    "worker h", "CPU h", "bytes", "batches", "samples", "energy", "GPU energy", "money",
    "gCO2",
)  # fmt: skip


def cost_text(fields: dict[str, Any]) -> str:
    """Format ``fields``, the fields of `penstock costs --json`, which
    csrc/controller/pool_costs.h describes."""
    return "\n".join(_lines(fields))


def _lines(fields: dict[str, Any]) -> Iterator[str]:
    jobs = fields["jobs"]
    names = [_name(job) for job in jobs]
    rows = [(*_name_cells(job), *_cells(job["total"])) for job in jobs]
    yield from table(("job", "trainer", "state", *_HEADS), rows)
    per_sample = [
        (*_name_cells(job), *_cells(job["per_1000_samples"], is_share=True))
        for job in jobs
        if job["per_1000_samples"] is not None
    ]
    if per_sample:
        yield ""
        yield "for 1,000 samples:"
        yield from table(("job", "trainer", "state", *_HEADS), per_sample)
    if notes := [*_notes(fields, names)]:
        yield ""
        yield from notes


def _name(job: dict[str, Any]) -> str:
    return f"{_job(job)} of {_trainer(job)}"


def _job(job: dict[str, Any]) -> str:
    name, user = text_of(job["job"]), job["user"]
    return name if user is None else f"{name} ({text_of(user)})"


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


def _cells(bill: dict[str, Any], *, is_share: bool = False) -> tuple[str, ...]:
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


def _notes(fields: dict[str, Any], names: list[str]) -> Iterator[str]:
    factors = fields["factors"]
    for job, name in zip(fields["jobs"], names, strict=True):
        count, metered = job["tenancies"], job["metered_tenancies"]
        if metered < count:
            known = _with_unit(job["metered_energy_j"], "J") if metered else "nothing"
            yield (
                f"energy of {name} is unknown: of {count} times that a worker served it, the "
                f"worker's host told its energy in {metered} ({known})"
            )
    if fields["jobs"]:
        if factors["price_per_hour"] is None and factors["energy_price_per_kwh"] is None:
            yield "money is unknown: give --price-per-hour, --energy-price or both"
        if factors["gco2_per_kwh"] is None:
            yield "gCO2 is unknown: give --gco2-per-kwh"
    if count := fields["jobs_left_out"]:
        yield f"{count} more jobs do not fit the controller's answer"
    if count := fields["jobs_forgotten"]:
        yield f"{count} older jobs are no longer kept"
