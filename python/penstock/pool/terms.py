# SPDX-License-Identifier: Apache-2.0
"""The operator's rules for a pool's jobs and users: a JSON file of priorities and quotas.

    {"jobs": {"train.py: Images": {"priority": 2.0, "quota": 16}},
     "users": {"ann": {"quota": 32}}}

Jobs are identified by the name that `penstock status` shows, users by the name for which their keys
were made (``penstock keys --user``). A priority multiplies the weight of a job's progress; its
default is 1. The priority of a job and the priority of its user are multiplied. A quota is the
maximal number of workers for all trainers of the name together; without one, there is no limit.
Jobs with one name and two users are two jobs.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

NamedTerms = dict[str, tuple[float, int | None]]  # priority and quota, by name

_QUOTA_MAX = 1 << 20
_EXAMPLE = '{"jobs": {"train.py: Images": {"priority": 2}}, "users": {"ann": {"quota": 16}}}'


@dataclass(frozen=True)
class Terms:
    jobs: NamedTerms = field(default_factory=dict)
    users: NamedTerms = field(default_factory=dict)


def read_terms(path: str) -> Terms:
    """Read a file of terms. Raise OSError, or ValueError that names the file and the entry."""
    with open(path, encoding="utf-8") as file:
        try:
            parts = json.load(file)
        except ValueError as error:
            raise ValueError(f"the terms in {path} are not valid JSON: {error}") from error
    if not isinstance(parts, dict) or not parts.keys() <= {"jobs", "users"}:
        seen = f"the keys {[*parts]}" if isinstance(parts, dict) else f"a {type(parts).__name__}"
        raise ValueError(
            f"the terms in {path} must be an object of jobs, users or both, such as {_EXAMPLE}, "
            f"got {seen}"
        )
    return Terms(*(_named_terms(path, part, parts.get(part, {})) for part in ("jobs", "users")))


def _named_terms(path: str, part: str, entries: Any) -> NamedTerms:
    if not isinstance(entries, dict):
        raise ValueError(
            f"the {part} in {path} must be an object, such as in {_EXAMPLE}, got a "
            f"{type(entries).__name__}"
        )
    return {name: _terms_of(path, name, entry) for name, entry in entries.items()}


def _terms_of(path: str, name: str, entry: Any) -> tuple[float, int | None]:
    where = f"the terms of {name!r} in {path}"
    if not isinstance(entry, dict) or not entry.keys() <= {"priority", "quota"}:
        raise ValueError(f"{where} must be an object of priority, quota or both, got {entry!r}")
    priority, quota = entry.get("priority", 1.0), entry.get("quota")
    if not _is_number(priority) or not math.isfinite(priority) or priority <= 0:
        raise ValueError(f"{where} must have a priority above 0, got {priority!r}")
    if quota is not None and not (type(quota) is int and 0 <= quota <= _QUOTA_MAX):
        raise ValueError(f"{where} must have a quota that is a number of workers, got {quota!r}")
    return float(priority), quota


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
