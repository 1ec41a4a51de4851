# SPDX-License-Identifier: Apache-2.0
"""What runs in a system's environment: job.py SYSTEM QUESTION OPTIONS, with the options as JSON.

Answers are lines of JSON on the first standard output; all other output goes to standard error.
The last one is {"end": true}, {"missing": reason} or {"error": exception}. A file that holds one
of them needs a main guard, since some systems start their workers by spawning.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import pickle
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from loaders import Job, Missing, TorchLoader
from samples import CONTAINERS, decoded, resized
from systems import SYSTEMS, System

MESSAGE_LENGTH_MAX = 160
WARM_BATCHES_MIN = 8
# Parts of messages that differ from run to run: process ids, addresses, nodes of a graph.
CHANGING = re.compile(r" \(pid(?:\(s\))? \d+\)| at 0x[0-9a-f]+|\{\{.*?\}\} ")


class Answers:
    """The lines that the harness reads."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def put(self, **answer: Any) -> None:
        self._file.write(json.dumps(answer) + "\n")


def stream(system: System, options: dict[str, Any], answers: Answers) -> None:
    """Deliver an epoch, or its rest: which samples, with which random numbers."""
    job = Job(**options["job"])
    random.seed(job.seed)
    np.random.seed(job.seed)
    pack = options.get("pack", False)
    loader = system.pack(job) if pack else system.open(job)
    if options.get("load"):
        loader.load(pickle.loads(Path(options["load"]).read_bytes()))
    stop_after, kill_after = options.get("stop_after"), options.get("kill_after")
    if stop_after and not isinstance(loader, TorchLoader):
        loader.state()  # Missing before the first batch
    for count, batch in enumerate(loader, 1):
        if pack:
            answers.put(rows=[digest(batch["tokens"])])
        else:
            pids = sorted({int(pid) for pid in batch["pid"]})
            ids, draws = [int(i) for i in batch["id"]], [float(draw) for draw in batch["draw"]]
            answers.put(ids=ids, draws=draws, pids=pids)
        if count == stop_after:
            Path(options["save"]).write_bytes(pickle.dumps(loader.state()))
            return
        if count == kill_after:
            victim = victim_of(system, batch)
            os.kill(victim, signal.SIGKILL)
            answers.put(killed=victim)
        if kill_after:
            time.sleep(0.005)  # so that workers are not long done when one dies


def victim_of(system: System, batch: Any) -> int:
    """The worker process that a check kills: a maker of this batch."""
    if system.workers_are == "threads":
        raise Missing("its workers are threads of the trainer")
    for server in getattr(system, "servers", ()):
        return int(server.pid)
    for pid in batch["pid"]:
        if int(pid) != os.getpid() and Path(f"/proc/{int(pid)}").exists():
            return int(pid)
    raise Missing("no worker process made this batch")


def containers(system: System, options: dict[str, Any], answers: Answers) -> None:
    """Whether a batch that the user's function returned arrives with the same type."""
    found = {}
    for name, collate in CONTAINERS.items():
        try:
            batch = next(iter(system.open(Job(**options["job"]), collate)))
        except Exception as error:
            found[name] = described(error)
        else:
            is_same = type(batch) is type(collate([{"id": 0, "draw": 0.0}]))
            found[name] = "yes" if is_same else f"a {type(batch).__name__}"
    answers.put(containers=found)


def pixels(system: System, options: dict[str, Any], answers: Answers) -> None:
    """How decoded and resized photographs differ from Pillow's."""
    job = Job(**options["job"])
    differing = value_count = largest = 0
    for batch in system.open(job):
        for index, image in zip(batch["id"], batch["image"], strict=True):
            path = job.samples.paths[int(index)]  # type: ignore[attr-defined]
            expected = resized(decoded(path.read_bytes())).astype(int)
            difference = np.abs(np.asarray(image).astype(int) - expected)
            differing += int((difference > 0).sum())
            largest = max(largest, int(difference.max()))
            value_count += difference.size
    answers.put(differing=differing, value_count=value_count, largest=largest)


def convert(system: System, options: dict[str, Any], answers: Answers) -> None:
    begin = time.perf_counter()
    is_converted = system.convert(Job(**options["job"]))
    answers.put(seconds=time.perf_counter() - begin if is_converted else None)


def versions(system: System, options: dict[str, Any], answers: Answers) -> None:
    answers.put(versions={name: importlib.metadata.version(name) for name in system.packages})


def serve(system: System, options: dict[str, Any], answers: Answers) -> None:
    """Workers outside of the trainer's processes, until standard input ends."""
    answers.put(service=system.serve(Path(options["folder"])))
    sys.stdin.read()


def drop_in(system: System, options: dict[str, Any], answers: Answers) -> None:
    """A training program of torch, in which the import of the loader alone is another."""
    program = Path(__file__).with_name("torch_program.py").read_text()
    theirs = "from torch.utils.data import DataLoader"
    if not system.drop_in:
        raise Missing("no class in the place of torch's DataLoader")
    if program.count(theirs + "\n") != 1:
        raise ValueError(f"torch_program.py must have one line {theirs!r}")
    changed = Path(options["folder"]) / f"{type(system).__name__.lower()}_program.py"
    changed.write_text(program.replace(theirs, system.drop_in))
    sys.path.insert(0, str(changed.parent))
    module = __import__(changed.stem)
    answers.put(digest=module.main())


def rates(system: System, options: dict[str, Any], answers: Answers) -> None:
    """Answer orders until standard input ends: open a workload, measure it."""
    answers.put(ready=True)
    loader = batches = None
    size = 0
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if "open" in order:
                loader = batches = None  # ends the workers of the last workload
                job = Job(**options["job"], kind=order["open"], is_endless=True)
                size = job.samples.batch_size
                loader = system.open(job)
                batches = endless(loader)
                begin = time.perf_counter()
                next(batches)
                answers.put(first_batch_s=time.perf_counter() - begin)
            elif "measure" in order:
                if system.buffers_are_unbounded:
                    batches = endless(loader)
                answers.put(rate=size * batch_rate(batches, order["warmup"], order["measure"]))
        except Exception as error:
            answers.put(error=described(error))


def batch_rate(batches: Iterator[Any], warmup_s: float, seconds: float) -> float:
    """Batches per second, after the batches that were made during the turns of other systems."""
    now = begin = time.perf_counter()
    for count in itertools.count():
        if count >= WARM_BATCHES_MIN and now > begin + warmup_s:
            break
        next(batches)
        now = time.perf_counter()
    begin, count = now, 0
    while now < begin + seconds:
        next(batches)
        count += 1
        now = time.perf_counter()
    return count / (now - begin)


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def digest(tokens: Any) -> str:
    import hashlib

    return hashlib.sha256(np.ascontiguousarray(np.asarray(tokens, np.int64))).hexdigest()[:16]


def described(error: BaseException) -> str:
    """The type and the first line of an exception, or the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = str(error).strip().splitlines() or [(frames[-1].line or "") if frames else ""]
    line = CHANGING.sub("", lines[0])
    text = f"{type(error).__name__}: {line}".rstrip(": ")
    return text if len(text) <= MESSAGE_LENGTH_MAX else text[:MESSAGE_LENGTH_MAX] + "..."


QUESTIONS = {
    question.__name__: question
    for question in (stream, containers, pixels, convert, versions, serve, drop_in, rates)
}


def main() -> None:
    answers = Answers()
    name, question, options = sys.argv[1:]
    try:
        QUESTIONS[question](SYSTEMS[name](), json.loads(options), answers)
        answers.put(end=True)
    except Missing as missing:
        answers.put(missing=str(missing))
    except BaseException as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises again in this block
        answers.put(error=described(error))
        traceback.print_exc()


if __name__ == "__main__":
    main()
