# SPDX-License-Identifier: Apache-2.0
"""One measurement in a separate process: bench/loader.py starts this and reads the last line.

A fresh process for each, because heaps, page tables and allocator thresholds that one loader leaves
behind change the cost of the next one.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median_high
from typing import Any

import process_tree
import torch
from stream_equal import first_difference
from torch.utils.data import BatchSampler, RandomSampler, Subset, TensorDataset
from workloads import HELD_WORKLOADS, WORKLOADS, Workload, load

WORKER_COUNT = 2
STARTED_WORKER_COUNT = 8
MEMORY_WORKER_COUNT = 4
MEMORY_EPOCHS = 3
SHORT_EPOCH_BATCHES = 8


def loader_class(kind: str, workload: Workload) -> Any:
    """The class, with the penstock options that the workload names."""
    if kind == "penstock":
        # A loader that falls back to torch's would be measured against itself.
        os.environ["PENSTOCK_FALLBACK"] = "error"
        from penstock import DataLoader

        def make_loader(**arguments: Any) -> Any:
            if workload.adapt_for_penstock is not None:
                workload.adapt_for_penstock(arguments)
            return DataLoader(**arguments, **workload.penstock_options)

        return make_loader
    return torch.utils.data.DataLoader


def rate(
    make_loader: Any, workload: Workload, arguments: dict[str, Any], args: argparse.Namespace
) -> dict[str, float]:
    """Batches per second of an empty loop over epoch after epoch, and their cost."""
    loader = make_loader(**arguments, persistent_workers=True)
    batches = _endless(loader)
    samples_and_bytes: list[tuple[int, int]] = []
    warm = time.perf_counter() + args.warmup
    while time.perf_counter() < warm or len(samples_and_bytes) < workload.warmup_batches:
        samples_and_bytes.append(_size(next(batches)))
    sample_count, byte_count = (sum(sizes) for sizes in zip(*samples_and_bytes, strict=True))

    busy_s, used = process_tree.machine_busy_s(), process_tree.usage(os.getpid())
    begin = now = time.perf_counter()
    batch_count = 0
    while now < begin + args.seconds or batch_count < workload.timed_batches:
        next(batches)
        batch_count += 1
        now = time.perf_counter()
    used = process_tree.usage(os.getpid()) - used
    busy_s = process_tree.machine_busy_s() - busy_s

    seconds = now - begin
    batch_bytes = byte_count / len(samples_and_bytes)
    moved_bytes = batch_count * batch_bytes
    return {
        "batches_per_s": batch_count / seconds,
        "samples_per_s": batch_count * sample_count / len(samples_and_bytes) / seconds,
        "gb_per_s": moved_bytes / 1e9 / seconds,
        "cpu_s_per_gb": used.cpu_s / (moved_bytes / 1e9),
        "faults_per_batch": used.minor_faults / batch_count,
        "faults_per_mb": used.minor_faults / (moved_bytes / 1e6),
        **_peak_memory(batches, args.seconds),
        "foreign_cores": max(0.0, busy_s - used.cpu_s) / seconds,
    }


def worker_cpu(
    make_loader: Any, workload: Workload, arguments: dict[str, Any], args: argparse.Namespace
) -> dict[str, float]:
    """CPU seconds of the workers for a batch, in an empty loop over epoch after epoch."""
    batches = _endless(make_loader(**arguments, persistent_workers=True))
    sizes: list[tuple[int, int]] = []
    warm = time.perf_counter() + args.warmup
    while time.perf_counter() < warm or len(sizes) < workload.warmup_batches:
        sizes.append(_size(next(batches)))
    sample_count, byte_count = (sum(size) for size in zip(*sizes, strict=True))

    def workers_cpu_s() -> float:
        return process_tree.usage(os.getpid()).cpu_s - time.process_time()

    used_s = workers_cpu_s()
    begin = now = time.perf_counter()
    batch_count = 0
    while now < begin + args.seconds or batch_count < workload.timed_batches:
        next(batches)
        batch_count += 1
        now = time.perf_counter()
    used_s = workers_cpu_s() - used_s
    return {
        "batches_per_s": batch_count / (now - begin),
        "worker_s": used_s / batch_count,
        "samples_per_batch": sample_count / len(sizes),
        "bytes_per_batch": byte_count / len(sizes),
    }


def first_batch(
    make_loader: Any, arguments: dict[str, Any], args: argparse.Namespace
) -> dict[str, float]:
    """Seconds from making the loader to its first batch; the median of several loaders."""
    seconds = []
    for _ in range(args.repeats):
        begin = time.perf_counter()
        batches = iter(make_loader(**arguments))
        next(batches)
        seconds.append(time.perf_counter() - begin)
        del batches
        gc.collect()
    return {"latency_s": median_high(seconds)}


def next_epoch(
    make_loader: Any, arguments: dict[str, Any], args: argparse.Namespace
) -> dict[str, float]:
    """Seconds from an epoch's last batch to the next one's first, the median of several epochs; and
    their excess over the seconds that one batch takes, made without workers.
    """
    batch_s = one_batch(make_loader, arguments, args)["latency_s"]
    loader = make_loader(**arguments, persistent_workers=True)
    seconds: list[float] = []
    last = None
    for _ in range(2 + args.repeats):
        for batch_index, _batch in enumerate(loader):
            now = time.perf_counter()
            if batch_index == 0 and last is not None:
                seconds.append(now - last)
            last = now
    turn_s = median_high(seconds[1:])  # the first turn is warm-up
    return {
        "latency_s": turn_s,
        "batch_s": batch_s,
        "beyond_batch_s": max(0.0, turn_s - batch_s),
    }


def one_batch(
    make_loader: Any, arguments: dict[str, Any], args: argparse.Namespace
) -> dict[str, float]:
    """Seconds of one next() without workers, where no batch is fetched ahead; the median of
    several.

    The first one, which connects to the store, is left out.
    """
    batches = _endless(make_loader(**{**arguments, "num_workers": 0}))
    return {"latency_s": median_high(_seconds_of(lambda: next(batches), 1 + args.repeats)[1:])}


def spawn_start(
    make_loader: Any, arguments: dict[str, Any], args: argparse.Namespace
) -> dict[str, float]:
    """Seconds from making the loader to its first batch, with workers whose dataset is empty."""
    return _fresh_start(make_loader, arguments, "spawn")


def forkserver_start(
    make_loader: Any, arguments: dict[str, Any], args: argparse.Namespace
) -> dict[str, float]:
    """The same through a fork server, which starts with the first worker."""
    return _fresh_start(make_loader, arguments, "forkserver")


def _fresh_start(make_loader: Any, arguments: dict[str, Any], method: str) -> dict[str, float]:
    begin = time.perf_counter()
    batches = iter(make_loader(**arguments, multiprocessing_context=method))
    next(batches)
    first_s = time.perf_counter() - begin
    # Batches are requested from the workers in turn, so each has answered by here.
    for _ in range(arguments["num_workers"] - 1):
        next(batches)
    every_s = time.perf_counter() - begin
    pss_bytes = process_tree.pss_bytes(os.getpid())
    return {"latency_s": first_s, "every_worker_s": every_s, "pss_bytes": float(pss_bytes)}


def memory(
    make_loader: Any, arguments: dict[str, Any], args: argparse.Namespace
) -> dict[str, float]:
    """The memory of the processes after some epochs, beyond the trainer's before the first."""
    loader = make_loader(**arguments, persistent_workers=True)
    gc.collect()
    before = process_tree.pss_bytes(os.getpid())
    fds_after = []
    for _ in range(MEMORY_EPOCHS):
        for _batch in loader:
            pass
        fds_after.append(process_tree.open_fds(os.getpid()))
    after = process_tree.pss_bytes(os.getpid())
    return {
        "growth_bytes": float(after - before),
        "pss_bytes": float(after),
        "open_fds": float(fds_after[-1]),
        "open_fds_growth": float(fds_after[-1] - fds_after[0]),
    }


def one_sample(arguments: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    """Seconds of one dataset[i], the least that a batch can take; the median of several."""
    indices = iter(range(len(arguments["dataset"])))
    seconds = _seconds_of(lambda: arguments["dataset"][next(indices)], 1 + args.repeats)
    return {"latency_s": median_high(seconds[1:])}


def limit(workload: Workload, arguments: dict[str, Any], args: argparse.Namespace) -> float:
    """Batches per second of the same work in processes without any transfer."""
    context = multiprocessing.get_context("fork")
    count = workload.work_process_count
    barrier, rates = context.Barrier(count), context.SimpleQueue()

    def run(index: int) -> None:
        torch.set_num_threads(1)
        work = workload.work(arguments, index, count)
        warm = time.perf_counter() + args.warmup
        while time.perf_counter() < warm:
            next(work)
        barrier.wait()
        begin = now = time.perf_counter()
        batch_count = 0
        while now < begin + args.seconds:
            next(work)
            batch_count += 1
            now = time.perf_counter()
        rates.put(batch_count / (now - begin))

    processes = [context.Process(target=run, args=(index,)) for index in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode != 0:
            raise RuntimeError(f"a process of the limit exited with code {process.exitcode}")
    return float(sum(rates.get() for _ in processes))


def sampler(arguments: dict[str, Any], args: argparse.Namespace) -> float:
    """Batches per second of torch's sampler alone."""
    indices = BatchSampler(
        RandomSampler(arguments["dataset"]), arguments["batch_size"], drop_last=False
    )
    batches = _endless(indices)
    warm = time.perf_counter() + args.warmup
    while time.perf_counter() < warm:
        next(batches)
    begin = now = time.perf_counter()
    batch_count = 0
    while now < begin + args.seconds:
        next(batches)
        batch_count += 1
        now = time.perf_counter()
    return batch_count / (now - begin)


def short_epochs(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with an epoch of a few batches; an iterable dataset stays as it is."""
    dataset, batch_size = arguments["dataset"], arguments["batch_size"]
    if batch_size is None:
        return arguments
    sample_count = min(len(dataset), SHORT_EPOCH_BATCHES * batch_size)
    if type(dataset) is TensorDataset:
        dataset = TensorDataset(*(tensor[:sample_count] for tensor in dataset.tensors))
    else:
        dataset = Subset(dataset, range(sample_count))
    return {**arguments, "dataset": dataset}


def _endless(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


def _seconds_of(call: Callable[[], Any], count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return seconds


def _size(batch: Any) -> tuple[int, int]:
    """How many samples a batch has, by the first tensor found, and how many bytes its tensors."""
    if isinstance(batch, torch.Tensor):
        return len(batch), batch.numel() * batch.element_size()
    items = batch.values() if isinstance(batch, Mapping) else batch
    sizes = [_size(item) for item in items]
    return sizes[0][0], sum(byte_count for _, byte_count in sizes)


def _peak_memory(batches: Iterator[Any], seconds: float) -> dict[str, float]:
    """The most memory seen, at full speed and while prefetched batches wait for a stopped loop.

    Runs after the timing: the kernel's answer takes milliseconds and holds up the processes.
    """
    pss = memory = 0

    def look() -> None:
        nonlocal pss, memory
        pss = max(pss, process_tree.pss_bytes(os.getpid()))
        memory = max(memory, process_tree.memory_bytes(os.getpid()))

    for _ in range(3):
        end = time.perf_counter() + seconds / 6
        asked = 0.0
        while time.perf_counter() < end:
            next(batches)
            if time.perf_counter() > asked + 0.1:
                look()
                asked = time.perf_counter()
        time.sleep(seconds / 10)
        look()
    return {"peak_pss_bytes": float(pss), "peak_memory_bytes": float(memory)}


LONG_QUESTIONS = {"rate": rate, "worker_cpu": worker_cpu}
SHORT_QUESTIONS = {"first_batch": first_batch, "next_epoch": next_epoch, "one_batch": one_batch}
# The samples of the whole dataset, with a separate number of workers.
HELD_QUESTIONS = {
    "spawn_start": (spawn_start, STARTED_WORKER_COUNT),
    "forkserver_start": (forkserver_start, STARTED_WORKER_COUNT),
    "memory": (memory, MEMORY_WORKER_COUNT),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=(*WORKLOADS, *HELD_WORKLOADS))
    questions = (*LONG_QUESTIONS, *SHORT_QUESTIONS, *HELD_QUESTIONS, "equal")
    parser.add_argument("question", choices=questions)
    parser.add_argument("kind", choices=("torch", "penstock", "limit", "sampler"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--warmup", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--workers", type=int, default=WORKER_COUNT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    workload = load(args.workload)
    folder = workload.folder(args.out, args.quick)
    arguments = workload.build(folder)
    result: dict[str, Any]
    if args.question == "equal":

        def build() -> dict[str, Any]:
            short = short_epochs(workload.build(folder))
            return {**short, "num_workers": WORKER_COUNT, "persistent_workers": True}

        classes = loader_class("torch", workload), loader_class("penstock", workload)
        result = {"difference": first_difference(build, classes)}
    elif args.kind == "limit" and args.question == "one_batch":
        result = one_sample(arguments, args)
    elif args.kind == "limit":
        result = {"batches_per_s": limit(workload, arguments, args)}
    elif args.kind == "sampler":
        result = {"batches_per_s": sampler(arguments, args)}
    elif args.question in HELD_QUESTIONS:
        ask, worker_count = HELD_QUESTIONS[args.question]
        arguments["num_workers"] = WORKER_COUNT if args.quick else worker_count
        result = ask(loader_class(args.kind, workload), arguments, args)
    else:
        arguments["num_workers"] = args.workers
        if args.question in LONG_QUESTIONS:
            result = LONG_QUESTIONS[args.question](
                loader_class(args.kind, workload), workload, arguments, args
            )
        else:
            make_loader = loader_class(args.kind, workload)
            result = SHORT_QUESTIONS[args.question](make_loader, short_epochs(arguments), args)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
