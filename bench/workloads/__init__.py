# SPDX-License-Identifier: Apache-2.0
"""The workloads of bench/loader.py, one module each, in the order in which they run."""

from __future__ import annotations

import importlib

from workloads.workload import Workload

# Workloads whose rate is measured.
WORKLOADS = (
    *("large", "tiny", "photographs", "tabular", "audio", "nested", "text"),
    *("object_store", "object_store_auto", "slow_samples"),
)
# Workloads with a large dataset: the time until workers have it, and the memory that they use.
HELD_WORKLOADS = ("object_list", "shared_list", "array", "tensor")


def load(name: str) -> Workload:
    """Imports one workload and its libraries; the others' stay out of a measurement."""
    workload = importlib.import_module(f"workloads.{name}").WORKLOAD
    assert isinstance(workload, Workload)
    return workload


__all__ = ["HELD_WORKLOADS", "WORKLOADS", "Workload", "load"]
