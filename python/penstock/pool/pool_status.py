# SPDX-License-Identifier: Apache-2.0
"""A pool's settings and members as its controller sees them, for programs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from penstock.pool.pool_log import printable_line, short_id

_NUMERICS = re.compile(r",? ?numerics (?P<kind>[0-9a-f]{8})")
_ABOUT = re.compile(
    r"(?P<host>[^,]+), process (?P<process>\d+(?:-\d+)?)(?:, (?P<software>.*))?", re.DOTALL
)


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
                f"{seen} the name {wanted!r} or an id that begins so; there are: "
                f"{there or 'none'}. Pass a name, or as much of an id as no other has"
            )
        return found[0]


def name_of(member: dict[str, Any]) -> str:
    """Return a display name for a worker or a trainer: its host and process, and its number if its
    process has several."""
    about = _ABOUT.fullmatch(text_of(member["about"]))
    return f"{about['host']}/{about['process']}" if about else short_id(member["id"])


def software_of(member: dict[str, Any]) -> str:
    """Return the versions that a worker or a trainer runs; "" if it did not report them."""
    about = _ABOUT.fullmatch(text_of(member["about"]))
    return _NUMERICS.sub("", about["software"] or "") if about else ""


def spoken_numerics() -> str:
    """Return the kind of this process's kernels for its self-description: processes of the same
    kind compute identical bits."""
    from penstock import _C  # loads torch

    return f"numerics {_C.numeric_fingerprint()[-1]:016x}"[:17]


def numerics_of(member: dict[str, Any]) -> str | None:
    """Return the kind of a worker's or trainer's kernels, as :func:`spoken_numerics` formats it."""
    found = _NUMERICS.search(text_of(member["about"]))
    return None if found is None else found["kind"]


def text_of(escaped: str) -> str:
    """Return a peer's text for a terminal line. The controller escapes each of its bytes
    separately."""
    return printable_line(escaped.encode("latin-1", "replace").decode(errors="replace"))
