# SPDX-License-Identifier: Apache-2.0
"""One run of a program for `penstock doctor`: ``python -m penstock.cli.examined_program PROGRAM``.

The environment has the orders; the result, one line of JSON, is written to the descriptor that they
name.
"""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.cli.program import ProgramError, run_file, run_module
from penstock.doctor.loader_watch import BatchBound, LoaderWatch
from penstock.doctor.program_runs import MovableCall, RunRequest, RunResult, end_with_parent

_TEXT_MAX = 2000
_CALLS_MAX = 8  # listed in the result
_PLAN_BATCHES_MAX = 16  # of all loaders; by then the model has been called with one


class EmptyInput(io.RawIOBase):
    """Standard input that is empty, and records whether it was read."""

    was_read = False

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0

    def readinto(self, buffer: object) -> int:
        self.was_read = True
        return 0


def main(program: Sequence[str]) -> int:
    end_with_parent()
    orders = RunRequest.of_environment()
    os.set_inheritable(orders.result_fd, False)
    asked = EmptyInput()
    sys.stdin = io.TextIOWrapper(io.BufferedReader(asked))
    start = _start_of(program)
    reported: list[RunResult] = []

    def report(result: RunResult) -> None:
        if not reported:
            result = replace(result, has_asked_input=asked.was_read)
            reported.append(result)
            sys.stdout.flush()
            os.write(orders.result_fd, (result.to_json() + "\n").encode())

    if orders.asks_for_plan:
        _find_plan(start, report)
    else:
        _watch_loaders(start, orders, report)
    return 0


def _watch_loaders(
    start: Callable[[], None], orders: RunRequest, report: Callable[[RunResult], None]
) -> None:
    watch = LoaderWatch(orders, report)
    try:
        with watch:
            start()
    except BaseException as error:
        # Any exception that a stopped program raises while it ends is a consequence of the stop.
        if not watch.is_stopped and not _is_success(error):
            report(_with_error(watch.result(), error))
            raise
    report(watch.result())


def _find_plan(start: Callable[[], None], report: Callable[[RunResult], None]) -> None:
    from penstock.explanation.model_watch import FoundPlan, ModelWatch

    def take(found: FoundPlan) -> None:
        plan = found.plan
        dearest = sorted(plan.moved, key=lambda call: -call.trainer_s)[:_CALLS_MAX]
        report(
            RunResult(
                movable_s=sum(call.trainer_s for call in plan.moved),
                movable_calls=tuple(
                    MovableCall(call.operator, call.trainer_s, call.device) for call in dearest
                ),
                plan_refusal=plan.refused or "",
            )
        )

    with BatchBound(_PLAN_BATCHES_MAX) as bound:
        watch = ModelWatch(None, take)
        try:
            with watch:
                start()
        except BaseException as error:
            is_over = watch.is_stopped or bound.is_reached
            if not is_over and not _is_success(error):
                report(_with_error(RunResult(), error))
                raise
        watch.end()
    report(RunResult(plan_refusal=str(watch.seen)))


def _start_of(program: Sequence[str]) -> Callable[[], None]:
    match list(program):
        case ["-m", module, *rest]:
            return functools.partial(run_module, module, rest)
        case [path, *rest]:
            return functools.partial(run_file, path, rest)
        case _:
            raise AssertionError("doctor always passes a program")


def _with_error(result: RunResult, error: BaseException) -> RunResult:
    kind = "no such program" if isinstance(error, ProgramError) else type(error).__name__
    return replace(result, error_type=kind, error=str(error)[:_TEXT_MAX])


def _is_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
