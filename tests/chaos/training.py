# SPDX-License-Identifier: Apache-2.0
"""A trainer as a program: ``training.py PLAN`` delivers a stream, prints a line for each batch, and
saves the loader's state every few batches. It can be killed at any instant, and another process
resumes from the last saved state.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pool_datasets import digest
from streams import CODE_PATHS, Stream

from penstock import Pool

TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Plan:
    """The orders to a trainer, as JSON."""

    stream: dict[str, Any]
    options: dict[str, Any]
    state_path: str
    saves_every: int = 5
    is_resumed: bool = False

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def main() -> None:
    plan = Plan(**json.loads(Path(sys.argv[1]).read_text()))
    stream = Stream(**plan.stream)
    options = dict(plan.options)
    if "pool" in options:
        keys = options.pop("keys", None)
        pool = Pool(options.pop("pool"), keys=keys, code_paths=CODE_PATHS)
        options = {"pool": pool, "timeout": TIMEOUT_S, **options}
    warnings.simplefilter("always")
    loader = stream.loader(**options)
    place = first_epoch = 0
    if plan.is_resumed and Path(plan.state_path).exists():
        saved = json.loads(Path(plan.state_path).read_text())
        loader.load_state_dict(saved["state"])
        place, first_epoch = saved["place"], saved["epoch"]
    emit(f"begins {place}")
    for epoch in range(first_epoch, stream.epoch_count):
        for batch in loader:
            emit(f"batch {place} {time.monotonic():.6f} {digest(batch)}")
            place += 1
            if place % plan.saves_every == 0:
                save(plan, {"place": place, "epoch": epoch, "state": loader.state_dict()})
        save(plan, {"place": place, "epoch": epoch + 1, "state": loader.state_dict()})
    emit("ends")


def emit(line: str) -> None:
    """Immediately, and in one write."""
    os.write(1, f"{line}\n".encode())


def save(plan: Plan, saved: dict[str, Any]) -> None:
    path = Path(plan.state_path)
    new = path.with_suffix(".new")
    try:
        new.write_text(json.dumps(saved))
    except OSError as err:  # no descriptor is left: the state before it is good as well
        print(f"the state of place {saved['place']} is not saved: {err}", file=sys.stderr)
        return
    new.replace(path)


if __name__ == "__main__":
    main()
