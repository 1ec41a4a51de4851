# SPDX-License-Identifier: Apache-2.0
"""What other ranks have written to the job's store, after a bounded wait for it."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from penstock.errors import RankError
from penstock.loader import job_store
from penstock.program_line import warn

_WARN_AFTER_S = 30.0
_POLL_S = 2.0  # the longest wait without a look at the clock


def read_of_ranks(store: Any, keys: Mapping[int, str], *, who: str, deed: str) -> dict[int, Any]:
    """The JSON values that the ranks have written, each under its key.

    Waits for them, for ``job_store.WAIT_S_MAX`` at most. who, deed: for messages: who waits, and
    for the others to do what. Raises RankError.
    """
    began = time.monotonic()
    is_told = False
    missing = [rank for rank, key in keys.items() if not store.check([key])]
    while missing:
        try:
            store.wait([keys[missing[0]]], datetime.timedelta(seconds=_POLL_S))
        except dist.DistStoreError:
            pass
        missing = [rank for rank in missing if not store.check([keys[rank]])]
        waited_s = time.monotonic() - began
        spoken = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        if missing and waited_s > job_store.WAIT_S_MAX:
            raise RankError(
                f"{who} has waited {waited_s:.0f} s for rank {spoken} to {deed}; every rank has to "
                f"iterate over its loader: see whether these ranks live, and what they do"
            )
        if missing and waited_s > _WARN_AFTER_S and not is_told:
            is_told = True
            warn(
                f"{who} waits for rank {spoken} to {deed}, for {job_store.WAIT_S_MAX:.0f} s at most"
            )
    return {rank: json.loads(store.get(key)) for rank, key in keys.items()}
