# SPDX-License-Identifier: Apache-2.0
"""The time of the first batch after iter(), where a loader resumes late in a long epoch.

The dataset is map-style and shuffled, and its samples are free, so the time measured is spent on
reaching the place. A state is made from one after the first step, by writing the step and the
delivered samples into it, and each restored loader's first batch is compared with the order of the
epoch. The kinds take turns, in one process:

- order: torch.randperm of as many samples, which torch's samplers and ours draw at the first batch
- fresh: a new loader's first epoch
- restored: a new loader, and load_state_dict()
- pool: the same with a pool's worker, which runs already
- started: start_prefetch() after load_state_dict(), some seconds before iter()
- torch: torch's DataLoader, fresh
- torchdata: a StatefulDataLoader, which replays its sampler, restored at an earlier step
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from figures import MeasurementError, Record, add_report_options, report, run_main, summary
from pool_host import PoolHost
from table import aligned, number
from torch.utils.data import Dataset

from penstock import DataLoader, Pool, Ranks

SEED = 5
BATCH_SIZE = 16
RANKS: dict[str, dict[str, Any]] = {
    "one process": {"batch_size": BATCH_SIZE},
    "ranks": {"ranks": Ranks(0, 2, global_batch_size=BATCH_SIZE)},
}


class Cheap(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def made(loader_class: Any, count: int, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(SEED)
    return loader_class(
        Cheap(count), shuffle=True, generator=generator, **{"num_workers": 2, **options}
    )


def state_at(step: int, loader: Any) -> dict[str, Any]:
    next(iter(loader))
    state: dict[str, Any] = loader.state_dict()
    state["_sampler_iter_yielded"] = state["_num_yielded"] = step
    counts = state["shards"]["counts"]
    state["shards"]["counts"] = [step // len(counts)] * len(counts)
    if "samples" in state:
        state["samples"] = step * BATCH_SIZE
    return state


def expected_batch(step: int, count: int, size: int) -> list[int]:
    """A batch of rank 0. The loader draws its base seed first."""
    generator = torch.Generator().manual_seed(SEED)
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    order = torch.randperm(count, generator=generator)
    return order[step * BATCH_SIZE :][:size].tolist()


def first_batch_s(loader: Any, expected: list[int] | None) -> float:
    begin = time.perf_counter()
    batches = iter(loader)
    batch = next(batches)
    seconds = time.perf_counter() - begin
    if expected is not None and batch.tolist() != expected:
        raise MeasurementError(f"the first batch is {batch.tolist()}, expected {expected}")
    return seconds


def order_s(count: int) -> float:
    begin = time.perf_counter()
    torch.randperm(count, generator=torch.Generator().manual_seed(SEED))
    return time.perf_counter() - begin


def torchdata_state(count: int, step: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = made(StatefulDataLoader, count, batch_size=BATCH_SIZE, num_workers=0)
    batches = iter(loader)
    next(itertools.islice(batches, step - 1, step))
    return loader.state_dict()


class Restored:
    """Makes and times loaders that are restored at one step."""

    def __init__(self, args: argparse.Namespace, ranks: str, pool: dict[str, Any]) -> None:
        self.args, self.options, self.pool = args, RANKS[ranks], pool
        shared = self.options.get("ranks")
        size = BATCH_SIZE // (1 if shared is None else shared.world_size)
        self.expected = expected_batch(args.step, args.count, size)
        seeding = {} if shared is not None else {"seeding": "batch"}
        self.state = state_at(args.step, made(DataLoader, args.count, **self.options))
        self.state_by_batch = state_at(
            args.step, made(DataLoader, args.count, **self.options, **seeding)
        )

    def loader(self, **options: Any) -> Any:
        loader = made(DataLoader, self.args.count, **self.options, **options)
        loader.load_state_dict(self.state_by_batch if "pool" in options else self.state)
        return loader

    def time(self, kind: str) -> float:
        if kind == "fresh":
            return first_batch_s(made(DataLoader, self.args.count, **self.options), None)
        if kind == "restored":
            return first_batch_s(self.loader(), self.expected)
        if kind == "pool":
            return first_batch_s(self.loader(**self.pool), self.expected)
        loader = self.loader()
        loader.start_prefetch()
        time.sleep(self.args.ahead_s)
        return first_batch_s(loader, self.expected)


def measure(args: argparse.Namespace) -> Iterator[Record]:
    from torch.utils.data import DataLoader as TorchLoader
    from torchdata.stateful_dataloader import StatefulDataLoader

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        host = stack.enter_context(PoolHost(Path(folder)))
        host.start_workers(2)
        host.wait_for_workers(2)
        pool = {"pool": Pool(host.endpoint, keys=host.keys), "num_workers": 0}
        restored = {ranks: Restored(args, ranks, pool) for ranks in RANKS}
        of_torchdata = torchdata_state(args.count, args.torchdata_step)
        seen: dict[tuple[str, str, int], list[float]] = {}
        for turn in range(args.rounds + 1):
            print(f"round {turn} of {args.rounds}", file=sys.stderr, flush=True)
            if turn == 1:
                seen.clear()  # the first brings code and memory in
            seen.setdefault(("order", "", 0), []).append(order_s(args.count))
            for ranks, one in restored.items():
                for kind in ("fresh", "restored", "pool", "started"):
                    step = 0 if kind == "fresh" else args.step
                    seen.setdefault((kind, ranks, step), []).append(one.time(kind))
            loader = made(TorchLoader, args.count, batch_size=BATCH_SIZE)
            seen.setdefault(("torch", "", 0), []).append(first_batch_s(loader, None))
            if turn > 1:
                continue  # once timed, since it takes long
            loader = made(StatefulDataLoader, args.count, batch_size=BATCH_SIZE, num_workers=0)
            loader.load_state_dict(of_torchdata)
            place = ("torchdata", "", args.torchdata_step)
            seen.setdefault(place, []).append(first_batch_s(loader, None))
    for (kind, ranks, step), values in seen.items():
        parameters = {"kind": kind, "ranks": ranks, "step": step, "samples": args.count}
        yield summary("restore/first_batch_s", parameters, values)


def table(everything: list[Record]) -> str:
    rows = [["", "loader", "at step", "first batch, s", "10th to 90th percentile", "n"]]
    for r in everything:
        kind, ranks, step, _ = r["parameters"].values()
        spread = f"{r['p10']:.3f} to {r['p90']:.3f}"
        rows.append([kind, ranks, number(step), f"{r['median']:.3f}", spread, str(r["n"])])
    return aligned(rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--count", type=int, default=1 << 24, help="samples (default: 2**24)")
    add("--step", type=int, default=1_000_000, help="step to resume at (default: 1000000)")
    add(
        "--torchdata-step", type=int, default=10_000, help="the same for torchdata (default: 10000)"
    )
    add("--ahead-s", type=float, default=3.0, help="seconds of start_prefetch() (default: 3)")
    add("--rounds", type=int, default=7, help="timed rounds (default: 7)")
    add("--quick", action="store_true", help="smoke test: one small round")
    add_report_options(parser)
    args = parser.parse_args()
    if args.quick:
        args.count, args.step, args.torchdata_step, args.rounds = 1 << 16, 4000, 100, 1
        args.ahead_s = 0.2
    return args


def main() -> int:
    done = report("restore", parse_arguments(), measure, table)
    return 2 if done is None else 0


if __name__ == "__main__":
    run_main(main)
