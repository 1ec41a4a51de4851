# SPDX-License-Identifier: Apache-2.0
"""The same names and labels, which a user of penstock keeps in a SharedList."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Subset

from workloads.object_list import build
from workloads.workload import Workload, fetch_samples


def share(arguments: dict[str, Any]) -> None:
    from penstock import SharedList

    dataset = arguments["dataset"]
    names = dataset.dataset if type(dataset) is Subset else dataset
    names.samples = SharedList(names.samples)


WORKLOAD = Workload(
    "shared_list",
    build,
    fetch_samples,
    work_is="reading the list, 2 processes",
    adapt_for_penstock=share,
)
