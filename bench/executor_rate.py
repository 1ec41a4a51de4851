# SPDX-License-Identifier: Apache-2.0
"""The time of one prefix per batch, by executor, in one process with one thread and a worker's
allocator settings. bench/executor.py starts this and reads the last line.

The kinds take turns by the call, in random order, and all return the same tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import process_tree
import torch
from executor_prefixes import Prefix, cases, zoo_cases

from penstock import _C

Run = Callable[[], Any]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    if args.malloc == "worker":
        _C.tune_malloc()
    prefix = (zoo_cases() if args.zoo else cases())[args.case]()
    executor = _C.Executor(_C.parse_graph(prefix.text), prefix.constants)
    kinds: dict[str, Run] = {
        "eager": lambda: prefix.module(*prefix.used_leaves),
        "executor": lambda: executor.run(prefix.leaves),
        "torchscript": traced(prefix),
    }
    build_s = 0.0
    if args.aotinductor:
        begin = time.perf_counter()
        kinds["aotinductor"] = compiled(prefix)
        build_s = time.perf_counter() - begin
    with torch.no_grad():
        expected = [value.clone() for value in kinds["eager"]()]
        equal = {kind: same_bits(run(), expected) for kind, run in kinds.items()}
        if not equal["executor"]:
            raise SystemExit(f"executor: {args.case} has other bits than eager has")
        times, faults, foreign_cores = alternate(kinds, args)
    return {
        "times_us": times,
        "faults": faults,
        "equal": equal,
        "build_s": build_s,
        "nodes": executor.graph.node_count,
        "saved_nodes": executor.saved_node_count,
        "output_bytes": sum(value.nbytes for value in expected),
        "foreign_cores": foreign_cores,
    }


def alternate(
    kinds: dict[str, Run], args: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, float], float]:
    """Microseconds of each call, minor page faults of a call, and the CPU time of other processes
    meanwhile."""
    draw = random.Random(args.seed)
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    faults = dict.fromkeys(kinds, 0)
    warm = time.perf_counter() + args.warmup
    is_timed = False
    while True:
        now = time.perf_counter()
        if not is_timed and now >= warm:
            is_timed, begin = True, now
            busy_s, used = process_tree.machine_busy_s(), process_tree.usage(os.getpid())
        if is_timed and now >= begin + args.seconds and len(times["eager"]) >= args.calls:
            break
        for kind in draw.sample(list(kinds), len(kinds)):
            run = kinds[kind]
            faults_before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            start = time.perf_counter_ns()
            result = run()
            del result
            end = time.perf_counter_ns()
            if is_timed:
                times[kind].append((end - start) / 1e3)
                faults[kind] += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults_before
    busy_s = process_tree.machine_busy_s() - busy_s
    used = process_tree.usage(os.getpid()) - used
    foreign_cores = max(0.0, busy_s - used.cpu_s) / (time.perf_counter() - begin)
    return times, {kind: n / len(times[kind]) for kind, n in faults.items()}, foreign_cores


def traced(prefix: Prefix) -> Run:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.jit.trace(prefix.module, tuple(prefix.used_leaves), check_trace=False)
        for _ in range(3):  # its profiling runs
            program(*prefix.used_leaves)
    return lambda: program(*prefix.used_leaves)


def compiled(prefix: Prefix) -> Run:
    """AOTInductor's library of the prefix, called from Python. Takes seconds to a minute to
    build."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        exported = torch.export.export(prefix.module, tuple(prefix.used_leaves), strict=False)
        package = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(Path(folder) / "prefix.pt2")
        )
        library = torch._inductor.aoti_load_package(package)
    return lambda: library(*prefix.used_leaves)


def same_bits(values: Any, expected: list[torch.Tensor]) -> bool:
    values = list(values) if isinstance(values, (tuple, list)) else [values]
    return len(values) == len(expected) and all(
        (a.dtype, a.shape) == (b.dtype, b.shape)
        and torch.equal(
            a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
        )
        for a, b in zip(values, expected, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("case", nargs="?")
    add("--zoo", action="store_true")
    add("--list", action="store_true")
    add("--seed", type=int, default=0)
    add("--seconds", type=float, default=3.0)
    add("--warmup", type=float, default=1.0)
    add("--calls", type=int, default=20)
    add("--malloc", choices=("worker", "default"), default="worker")
    add("--aotinductor", action="store_true")
    args = parser.parse_args()
    if args.list:
        print(json.dumps(list(zoo_cases() if args.zoo else cases())))
    else:
        print(json.dumps(measure(args)))


if __name__ == "__main__":
    sys.exit(main())
