# SPDX-License-Identifier: Apache-2.0
"""The settings of a pool worker at its start.

The process that starts it does not load torch, so this module does not either.
"""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE_S = 60.0
DRAIN_GRACE_S = 30.0  # server::kDrainGrace


@dataclass(frozen=True, slots=True)
class PoolWorkerSpec:
    """The addresses and peers of a worker. Without a controller, it serves every holder of the
    key."""

    bind: str
    advertised: str | None
    data_bind: str | None
    data_advertised: str | None
    controller: str | None
    key_folder: str | None
    patience_s: float
    parent_pid: int  # of the process with which it ends
    # A name under which it listens for a trainer on this machine, to hand over batches as slabs.
    handover: str = ""
    # The engine's name for the worker; "" without an engine.
    name: str = ""
    # The powercap tree of this machine, which must report its energy; "" is the default location in
    # Linux, used if it is readable.
    powercap: str = ""
    # The time for finishing its batches once it is to leave.
    grace_s: float = DRAIN_GRACE_S

    @classmethod
    def of_trainer(
        cls, trainer_pid: int, handover: str, key_folder: str | None = None
    ) -> PoolWorkerSpec:
        """Return the settings of a worker that a trainer starts for itself, on loopback. Without
        ``key_folder``, it uses the shared keys of this user, found by its own environment."""
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
