# SPDX-License-Identifier: Apache-2.0
"""What an operator lays down for a pool's jobs: a JSON file of priorities and quotas, by the name
that `penstock status` shows of a job.

    {"train.py: Images": {"priority": 2.0, "quota": 16}, "sweep.py: Rows": {"quota": 4}}

A priority multiplies what a job's progress counts for; 1 where none is given. A quota is the most
workers that all trainers of the name have together; without one there is no bound.
"""

from __future__ import annotations

import json
import math
from typing import Any

JobTerms = dict[str, tuple[float, int | None]]  # priority and quota, by the job's name

_QUOTA_MAX = 1 << 20


def read_job_terms(path: str) -> JobTerms:
    """Raises ValueError, which names the file and the entry, and OSError."""
    with open(path, encoding="utf-8") as file:
        try:
            entries = json.load(file)
        except ValueError as error:
            raise ValueError(f"the terms of jobs in {path} are no JSON: {error}") from error
    if not isinstance(entries, dict):
        raise ValueError(
            f"the terms of jobs in {path} are a JSON {type(entries).__name__}; expected an object "
            f'such as {{"train.py: Images": {{"priority": 2, "quota": 16}}}}'
        )
    return {name: _terms_of(path, name, entry) for name, entry in entries.items()}


def _terms_of(path: str, name: str, entry: Any) -> tuple[float, int | None]:
    where = f"the terms of {name!r} in {path}"
    if not isinstance(entry, dict) or not entry.keys() <= {"priority", "quota"}:
        raise ValueError(f"{where} are {entry!r}; expected an object of priority, quota or both")
    priority, quota = entry.get("priority", 1.0), entry.get("quota")
    if not _is_number(priority) or not math.isfinite(priority) or priority <= 0:
        raise ValueError(f"{where} have the priority {priority!r}; expected a number above 0")
    if quota is not None and not (type(quota) is int and 0 <= quota <= _QUOTA_MAX):
        raise ValueError(f"{where} have the quota {quota!r}; expected a whole number of workers")
    return float(priority), quota


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
