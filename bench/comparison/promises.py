# SPDX-License-Identifier: Apache-2.0
"""The promises: each is a check that runs on the system itself, and its value is what happened."""

from __future__ import annotations

import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import JobProcess, Outcome

LIMIT_S = 150.0
SAMPLE_COUNT = 2048  # of samples.Numbered; samples.py is imported in the environments alone
STOP_AFTER = 40
KILL_AFTER = 40


@dataclass
class Bench:
    """Runs the jobs of one system, and keeps the streams that several checks compare with."""

    system: str
    python: Path
    folder: Path
    is_quick: bool = False

    def __post_init__(self) -> None:
        self._streams: dict[str, Outcome] = {}

    @property
    def log(self) -> Path:
        return self.folder / f"{self.system}.log"

    def ask(self, question: str, options: dict[str, Any], limit_s: float = LIMIT_S) -> Outcome:
        with JobProcess(self.python, self.system, question, options, log=self.log) as job:
            return job.outcome(limit_s)

    def stream(self, limit_s: float = LIMIT_S, **options: Any) -> Outcome:
        return self.ask("stream", self.stream_options(**options), limit_s)

    def stream_options(self, kind: str = "numbered", **options: Any) -> dict[str, Any]:
        names = ("workers", "seed", "rank", "ranks", "by_rank", "service")
        job = {name: options.pop(name) for name in names if name in options}
        return {"job": {"kind": kind, "folder": str(self.folder), **job}, **options}

    def whole(self, **options: Any) -> Outcome:
        """An uninterrupted epoch, which is read once."""
        key = repr(sorted(options.items()))
        if key not in self._streams:
            self._streams[key] = self.stream(**options)
        return self._streams[key]

    def state(self, name: str) -> str:
        return str(self.folder / f"{self.system}-{name}.state")


def same_order(bench: Bench) -> str:
    """Two processes with the same seed deliver the same samples in the same order."""
    first = bench.whole()
    if not first.is_complete:
        return _no(first)
    if (wrong := once_each(first)) != "yes":
        return wrong
    if first.all("ids") == sorted(first.all("ids")):
        return "no: the order is not shuffled"
    second = bench.stream()
    return _equal(first.all("ids"), second, "another order")


def same_order_of_more(bench: Bench) -> str:
    """Three workers deliver the samples in the order of two."""
    first = bench.whole()
    return _equal_or_why(first, bench.stream(workers=3), "another order")


def killed_worker(bench: Bench) -> str:
    """A worker process gets SIGKILL after 40 of 256 batches; each sample arrives once."""
    outcome = bench.stream(kill_after=KILL_AFTER)
    if outcome.missing:
        return f"not applicable: {outcome.missing}"
    if outcome.get("killed") is None:
        return _no(outcome) if outcome.error else "no: the epoch ended before a kill"
    if not outcome.is_complete:
        return f"no: {outcome.error}"
    return once_each(outcome)


def resume(bench: Bench) -> str:
    """A state after 40 batches, loaded by a new process: it delivers the remaining samples in the
    order of the uninterrupted epoch."""
    return _resumed(bench, "ids", workers=2)


def resume_draws(bench: Bench) -> str:
    """The samples draw the random numbers of the uninterrupted epoch, too."""
    return _resumed(bench, "draws", workers=2)


def resume_with_more(bench: Bench) -> str:
    """The state of two workers is loaded with three."""
    return _resumed(bench, "ids", workers=3)


def resume_with_fewer_ranks(bench: Bench) -> str:
    """Two ranks stop after 20 batches each; one rank loads the state of rank 0. All three together
    deliver each sample once."""
    environment = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }  # fmt: skip
    jobs = []
    try:
        for rank in range(2):
            options = bench.stream_options(
                rank=rank, ranks=2, by_rank=True, stop_after=STOP_AFTER // 2,
                save=bench.state(f"rank-{rank}"),
            )  # fmt: skip
            job = JobProcess(
                bench.python, bench.system, "stream", options, log=bench.log,
                environment={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )  # fmt: skip
            jobs.append(job)
        parts = [job.outcome(LIMIT_S) for job in jobs]
    finally:
        for job in jobs:
            job.close()
    for part in parts:
        if not part.is_complete:
            return _no(part)
    rest = bench.stream(by_rank=True, load=bench.state("rank-0"))
    if not rest.is_complete:
        return _no(rest)
    return counted(parts[0].all("ids") + parts[1].all("ids") + rest.all("ids"))


def packing(bench: Bench) -> str:
    """Documents packed into rows of 128 tokens; a state after 20 rows, loaded by a new process,
    delivers the remaining rows with the same tokens."""
    whole = bench.whole(kind="documents", pack=True)
    if not whole.is_complete:
        return _no(whole)
    stopped = bench.stream(kind="documents", pack=True, stop_after=20, save=bench.state("pack"))
    if not stopped.is_complete:
        return _no(stopped)
    rest = bench.stream(kind="documents", pack=True, load=bench.state("pack"))
    return _equal(whole.all("rows")[20:], rest, "other rows")


def containers(bench: Bench) -> str:
    """Batches that the user's function returns as a namedtuple, a dataclass and a UserDict arrive
    with these types."""
    outcome = bench.ask("containers", bench.stream_options())
    if not outcome.is_complete:
        return _no(outcome)
    found: dict[str, str] = outcome.get("containers")
    if set(found.values()) == {"yes"}:
        return "yes"
    head = "in part" if "yes" in found.values() else "no"
    return f"{head}: " + "; ".join(f"{name}: {value}" for name, value in found.items())


def remote_workers(bench: Bench) -> str:
    """Workers that another process started, which are no children of the trainer and are connected
    over TCP, make the batches; each sample arrives once."""
    options = {"folder": str(bench.folder)}
    with JobProcess(bench.python, bench.system, "serve", options, log=bench.log) as server:
        answer = _first_answer(server)
        if "service" not in answer:
            return _no(Outcome(missing=answer.get("missing", ""), error=answer.get("error", "")))
        outcome = bench.stream(service=answer["service"])
        if not outcome.is_complete:
            return _no(outcome)
        server.finish()
    return once_each(outcome)


def drop_in(bench: Bench) -> str:
    """A training program of torch, in which only the import of DataLoader is changed, has the
    losses of torch's loader, bit for bit."""
    options = {"folder": str(bench.folder)}
    outcome = bench.ask("drop_in", options)
    if not outcome.is_complete:
        return _no(outcome)
    expected = Bench("torch", Path(sys.executable), bench.folder).ask("drop_in", options)
    if not expected.is_complete:
        raise RuntimeError(f"the program does not run with torch's loader: {expected.error}")
    return (
        "yes"
        if outcome.get("digest") == expected.get("digest")
        else "no: it runs, with other losses"
    )


def pixels(bench: Bench) -> str:
    """32 JPEG files, decoded and resized to 64 x 64 by functions of the system if it has any,
    else by user code: equal to Pillow's pixels."""
    outcome = bench.ask("pixels", bench.stream_options("pixels"))
    if not outcome.is_complete:
        return _no(outcome)
    count, differing = outcome.get("value_count"), outcome.get("differing")
    if not count:
        return "no: no pixels arrived"
    if not differing:
        return "yes"
    return f"no: {differing / count:.0%} of the values differ, by up to {outcome.get('largest')}"


PROMISES: dict[str, tuple[str, Callable[[Bench], str]]] = {
    "order": ("Same seed, same order", same_order),
    "order_of_more": ("Same order with another number of workers", same_order_of_more),
    "killed_worker": ("Each sample once when a worker is killed", killed_worker),
    "resume": ("Exact resume in mid-epoch", resume),
    "resume_draws": ("Same random numbers after a resume", resume_draws),
    "resume_with_more": ("Resume with another number of workers", resume_with_more),
    "resume_with_fewer_ranks": ("Resume on one rank instead of two", resume_with_fewer_ranks),
    "packing": ("Packed rows with exact resume", packing),
    "containers": ("Batches keep their container", containers),
    "remote_workers": ("Remote workers", remote_workers),
    "drop_in": ("Drop-in for torch's loader", drop_in),
    "pixels": ("Pillow's pixels", pixels),
}
CONVERTED = ("numbered", "pixels")  # kinds that the checks read from converted files


def once_each(outcome: Outcome) -> str:
    return counted(outcome.all("ids"))


def counted(ids: list[int]) -> str:
    """`yes`, or how many samples did not arrive or arrived more than once."""
    counts = Counter(ids)
    missing = sum(1 for index in range(SAMPLE_COUNT) if index not in counts)
    again = sum(1 for count in counts.values() if count > 1)
    if not missing and not again and len(counts) == SAMPLE_COUNT:
        return "yes"
    parts = [f"{missing} of {SAMPLE_COUNT} samples missing"] if missing else []
    parts += [f"{again} samples repeated"] if again else []
    return "no: " + ", ".join(parts)


def _resumed(bench: Bench, answer: str, workers: int) -> str:
    whole = bench.whole()
    if not whole.is_complete:
        return _no(whole)
    state = bench.state("resume")
    stopped = bench.whole(stop_after=STOP_AFTER, save=state)
    if not stopped.is_complete:
        return _no(stopped)
    rest = bench.whole(load=state, workers=workers)
    if not rest.is_complete:
        return _no(rest)
    everything = whole.all(answer)
    done = len(stopped.all("ids"))
    if stopped.all("ids") != whole.all("ids")[:done]:
        return "no: the stopped epoch had another order"
    expected = everything[done:]
    if rest.all(answer) == expected:
        return "yes"
    if answer == "draws":
        return "no: other random numbers"
    ids = stopped.all("ids") + rest.all("ids")
    return "no: another order, each sample once" if counted(ids) == "yes" else counted(ids)


def _equal(expected: list[Any], outcome: Outcome, otherwise: str) -> str:
    if not outcome.is_complete:
        return _no(outcome)
    name = "rows" if outcome.get("rows") else "ids"
    if outcome.all(name) == expected:
        return "yes"
    return f"no: {otherwise}"


def _equal_or_why(first: Outcome, second: Outcome, otherwise: str) -> str:
    return _equal(first.all("ids"), second, otherwise) if first.is_complete else _no(first)


def _no(outcome: Outcome) -> str:
    return f"no: {outcome.missing or outcome.error}"


def _first_answer(job: JobProcess) -> dict[str, Any]:
    try:
        answer = job.read(time.monotonic() + LIMIT_S)
    except TimeoutError:
        return {"error": f"did not start within {LIMIT_S:.0f} s"}
    return answer or {"error": f"ended with exit status {job.process.wait()}"}


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
