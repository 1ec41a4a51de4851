# SPDX-License-Identifier: Apache-2.0
"""The rates: every system keeps a process, and all take turns in each round of a workload."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import JobProcess

WORKLOADS = ("rows", "photographs", "texts", "heavy")
START_S_MAX = 120.0
OPEN_S_MAX = 60.0
MEASURE_S_MAX = 60.0
WORKLOAD_S_MAX = 105.0  # after which no further round is started

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """Windows of a workload, by turns."""

    rounds: int = 5
    seconds: float = 0.9
    warmup: float = 0.3


class Contestant:
    """A system's process, and why it has no rates of a workload if it has none.

    A process that is stuck is ended, and the next workload has a new one.
    """

    def __init__(self, system: str, python: Path, folder: Path) -> None:
        self.system, self._python, self._folder = system, python, folder
        self._job: JobProcess | None = None
        self.why_not = ""
        self.rates: list[float] = []

    def __enter__(self) -> Contestant:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._job is not None:
            self._job.close()

    def start(self) -> None:
        """Start the process; the first answer of `open` waits for it."""
        options = {"job": {"folder": str(self._folder)}}
        log = self._folder / f"{self.system}.log"
        self._job = JobProcess(self._python, self.system, "rates", options, log=log)
        self._is_ready = False

    def _answer(self, name: str, limit_s: float) -> Any:
        """The job's answer of this name; None, with the reason kept, if it gives another."""
        assert self._job is not None
        try:
            answer = self._job.read(time.monotonic() + limit_s)
        except TimeoutError:
            answer = self._end(f"no batch within {limit_s:.0f} s")
        else:
            if answer is None:
                status = self._job.process.wait()
                answer = self._end(f"its process ended with exit status {status}")
        self.why_not = answer.get("error") or answer.get("missing", "")
        return answer.get(name)

    def open(self, workload: str) -> None:
        """Have the process make a loader, and take its first batch."""
        self.rates = []
        if self._job is None:
            self.start()
        assert self._job is not None
        if self._is_ready or self._answer("ready", START_S_MAX):
            self._is_ready = True
            self._job.order(open=workload)
            self._answer("first_batch_s", OPEN_S_MAX)

    def measure(self, plan: Plan) -> None:
        assert self._job is not None
        self._job.order(measure=plan.seconds, warmup=plan.warmup)
        rate = self._answer("rate", MEASURE_S_MAX + plan.seconds)
        if rate is not None:
            self.rates.append(rate)

    def finish(self) -> None:
        if self._job is not None:
            self._job.finish()

    def _end(self, reason: str) -> dict[str, str]:
        assert self._job is not None
        self._job.close()
        self._job = None
        return {"error": reason}


def measure(
    pythons: dict[str, Path], folder: Path, workloads: list[str], plan: Plan, log: Log
) -> Iterator[dict[str, Any]]:
    """Yield one record for each workload and system: samples per second of each round, or why
    there are none."""
    with ExitStack() as stack:
        contestants = [
            stack.enter_context(Contestant(system, python, folder))
            for system, python in pythons.items()
        ]
        for workload in workloads:
            yield from _measure_workload(contestants, workload, plan, log)
        for contestant in contestants:
            contestant.finish()


def _measure_workload(
    contestants: list[Contestant], workload: str, plan: Plan, log: Log
) -> Iterator[dict[str, Any]]:
    deadline = time.monotonic() + WORKLOAD_S_MAX
    for contestant in contestants:
        log(f"{workload}: starting {contestant.system}")
        contestant.open(workload)
    for index in range(plan.rounds):
        if index and time.monotonic() > deadline:
            log(f"{workload}: no time for further rounds")
            break
        able = [contestant for contestant in contestants if not contestant.why_not]
        first = index % max(1, len(able))
        for contestant in able[first:] + able[:first]:
            contestant.measure(plan)
        shown = ", ".join(f"{each.system} {each.rates[-1]:.0f}" for each in able if each.rates)
        log(f"{workload}: round {index + 1} of {plan.rounds}, samples per second: {shown}")
    base = next((each.rates for each in contestants if each.system == "torch"), [])
    for contestant in contestants:
        record = {"workload": workload, "system": contestant.system}
        if contestant.why_not:
            yield record | {"why_not": contestant.why_not}
        elif len(base) == len(contestant.rates):
            ratios = [own / other for own, other in zip(contestant.rates, base, strict=True)]
            yield record | {"rates": contestant.rates, "ratios": ratios}
        else:
            yield record | {"rates": contestant.rates, "ratios": []}
