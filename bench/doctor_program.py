# SPDX-License-Identifier: Apache-2.0
"""An empty loop over a workload of bench/loader.py, with one worker, one thread and one batch
ahead: the program that the doctor examines for bench/doctor.py."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
from workloads import load

from penstock import DataLoader


def loader_of(workload: str, folder: Path, quick: bool, options: dict[str, Any]) -> Any:
    arguments = load(workload).build(load(workload).folder(folder, quick))
    return DataLoader(**arguments, **options, persistent_workers=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ones = {"num_workers": 1, "prefetch_factor": 1, "fetch_threads": 1}
    loader = loader_of(args.workload, args.data, args.quick, ones)
    for _ in itertools.count():
        for _batch in loader:
            pass


if __name__ == "__main__":
    main()
