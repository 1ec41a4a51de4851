# SPDX-License-Identifier: Apache-2.0
"""A pool as its controller sees it: for people, and to find a worker in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_SHOWN_ID_DIGITS = 8


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """What `penstock status --json` prints; csrc/controller/pool_status.h has its fields."""

    fields: dict[str, Any]

    def find_worker(self, prefix: str) -> str:
        """The id of the one worker whose id begins so. Raises ValueError if there is none, or
        several."""
        wanted = prefix.lower()
        ids = [worker["id"] for worker in self.fields["workers"]]
        found = [worker_id for worker_id in ids if worker_id.startswith(wanted)] if wanted else []
        if len(found) != 1:
            there = ", ".join(ids) if ids else "none"
            seen = f"{len(found)} workers have" if found else "no worker has"
            raise ValueError(
                f"{seen} an id that begins with {prefix!r}; there are: {there}. Pass an id, or as "
                f"much of it as no other has"
            )
        return str(found[0])

    def __str__(self) -> str:
        controller = self.fields["controller"]
        state = "" if controller["is_settled"] else "; it has just started and assigns nobody yet"
        parts = [f"controller {_short(controller['id'])} at {controller['endpoint']}{state}"]
        workers = [
            (
                _short(worker["id"]),
                worker["endpoint"],
                _work_of(worker),
                f"{worker['since_report_s']:.1f} s",
                worker["about"],
            )
            for worker in self.fields["workers"]
        ]
        parts += _table(("worker", "reached at", "works for", "last heard", ""), workers)
        trainers = [
            (
                _short(trainer["id"]),
                trainer["job"],
                f"{trainer['workers']} of {trainer['workers_max']}",
                str(trainer["queue"]["ready_batches"]),
                str(trainer["queue"]["asked_batches"]),
                f"{trainer['queue']['bytes_in_flight'] / 1e6:.1f} MB",
                f"{trainer['queue']['waited_s']:.1f} s",
                str(trainer["queue"]["delivered_batches"]),
                trainer["about"],
            )
            for trainer in self.fields["trainers"]
        ]
        heads = ("trainer", "job", "workers", "ready", "asked", "in flight", "waited", "delivered")
        # What a trainer is tells jobs of one name apart.
        parts += _table((*heads, ""), trainers)
        return "\n".join(parts)


def _short(identity: str | None) -> str:
    return "nobody" if identity is None else identity[:_SHOWN_ID_DIGITS]


def _work_of(worker: dict[str, Any]) -> str:
    text = _short(worker["trainer"] or worker["assigned_to"])
    if worker["is_draining"] or worker["is_withdrawn"]:
        text += ", leaving" if worker["is_draining"] else ", moving"
    if worker["unfit_for"]:
        text += ", cannot work for " + ", ".join(_short(trainer) for trainer in worker["unfit_for"])
    return text


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned lines, or one that says that there is nothing."""
    if not rows:
        return [f"no {heads[0]}s"]
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (heads, *rows)
    ]
