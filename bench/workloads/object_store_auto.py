# SPDX-License-Identifier: Apache-2.0
"""The object store's objects, fetched by as many threads as the workers find out to be faster."""

from __future__ import annotations

from dataclasses import replace

from workloads import object_store

WORKLOAD = replace(
    object_store.WORKLOAD,
    name="object_store_auto",
    penstock_options={"fetch_threads": "auto"},
    warmup_batches=8,  # which the workers need to decide
)
