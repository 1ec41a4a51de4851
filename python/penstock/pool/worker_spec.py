# SPDX-License-Identifier: Apache-2.0
"""The orders of a pool's worker when it starts.

The process that starts it has no torch, so this module has none either.
"""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE_S = 60.0
DRAIN_GRACE_S = 30.0  # server::kDrainGrace


@dataclass(frozen=True, slots=True)
class PoolWorkerSpec:
    """Where a worker listens, and for whom. Without a controller it serves every holder of the
    key."""

    bind: str
    advertised: str | None
    data_bind: str | None
    data_advertised: str | None
    controller: str | None
    key_folder: str | None
    patience_s: float
    parent_pid: int  # of the process that it ends with
    # A name at which it listens for a trainer of this machine, to hand batches over as slabs.
    handover: str = ""
    # What the engine that starts the worker knows it by; "" without an engine.
    name: str = ""
    # The powercap tree of this machine, which must tell its energy; "" is where Linux has it, if it
    # can be read.
    powercap: str = ""
    # How long it may take for what it has begun, once it is to leave.
    grace_s: float = DRAIN_GRACE_S

    @classmethod
    def of_trainer(
        cls, trainer_pid: int, handover: str, key_folder: str | None = None
    ) -> PoolWorkerSpec:
        """A worker that a trainer starts for itself, on loopback. Without ``key_folder`` it has the
        keys that this user's processes share, as its own environment says where they lie."""
        return cls(
            bind="tcp://127.0.0.1:0",
            advertised=None,
            data_bind=None,
            data_advertised=None,
            controller=None,
            key_folder=key_folder,
            patience_s=PATIENCE_S,
            parent_pid=trainer_pid,
            handover=handover,
        )
