# SPDX-License-Identifier: Apache-2.0
"""`penstock explain`: runs a program until its model's plan is known, and prints the plan.

Standard output contains only the plan. The program's output is redirected to standard error, which
also has the line that names the program.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from penstock.cli.command_parser import error_record
from penstock.cli.program import ProgramError
from penstock.compat import modules
from penstock.explanation import model_watch
from penstock.explanation.model_watch import FoundPlan, ModelWatch
from penstock.graph.plan_picture import format_svg

if TYPE_CHECKING:
    from penstock.graph.plan import Plan
    from penstock.graph.planning import CutMode

PlanFormat = Literal["text", "table", "json", "dot"]

# For a program that ended without calling a model with a batch, and for a picture that could not be
# written.
NO_PLAN_EXIT_CODE = 1


def explain_program(
    run: Callable[[], None],
    plan_format: PlanFormat,
    cut: CutMode | None,
    pictures: Mapping[str, Path],
) -> int:
    """Run the program by `run`, and return the exit code. Also draws the plan into the files of
    `pictures`, by "html" or "svg". Raises the program's exceptions, or ProgramError if the program
    does not exist."""
    plan_descriptor = _take_standard_output()
    faults: list[str] = []

    def write(text: str) -> None:
        # A reader may stop early, as `head` does.
        with (
            contextlib.suppress(BrokenPipeError),
            open(plan_descriptor, "w", errors="replace") as stream,
        ):
            stream.write(text + "\n")

    def report(found: FoundPlan) -> None:
        sys.stdout.flush()  # the program's output precedes the plan
        print(f"penstock: the plan of {found.subject}", file=sys.stderr, flush=True)
        if os.environ.get("RANK", "0") == "0":  # only one of several trainers prints
            write(_formatted(found.plan, plan_format))
            for form, path in pictures.items():
                try:
                    drawn = format_svg(found.plan) if form == "svg" else found.plan.to_html()
                    path.write_text(drawn, encoding="utf-8")
                except (OSError, subprocess.CalledProcessError) as error:
                    faults.append(f"the picture of the plan could not be written: {error}")

    def report_error(code: str, message: str) -> None:
        if plan_format == "json" and watch.found is None:
            write(error_record(code, message))

    watch = ModelWatch(cut, report)
    sys.excepthook = _HookWithoutWatch(sys.excepthook)
    try:
        with watch:
            run()
    except ProgramError:
        os.dup2(plan_descriptor, 1)
        os.close(plan_descriptor)
        raise
    except BaseException as error:
        # Any exception that a stopped program raises while it ends is a consequence of the stop.
        if not watch.is_stopped and not _is_success(error):
            report_error("program-failed", f"{type(error).__name__}: {error}")
            raise
    watch.end()
    for fault in faults:
        print(f"penstock: {fault}", file=sys.stderr)
    if watch.found is not None:
        return NO_PLAN_EXIT_CODE if faults else 0
    sys.stdout.flush()
    report_error("no-plan", str(watch.seen))
    print(f"penstock: there is no plan: {watch.seen}", file=sys.stderr)
    return NO_PLAN_EXIT_CODE


def _formatted(plan: Plan, plan_format: PlanFormat) -> str:
    match plan_format:
        case "text":
            return str(plan)
        case "table":
            return plan.table()
        case "json":
            return plan.to_json()
        case "dot":
            return plan.to_dot()


def _take_standard_output() -> int:
    """Return a descriptor of the current standard output. From here on, and until the process ends,
    standard output is standard error, also for processes and libraries that the program starts or
    loads."""
    sys.stdout.flush()
    descriptor = os.dup(1)
    os.dup2(2, 1)
    return descriptor


def _is_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


class _HookWithoutWatch:
    """Prints the program's errors without the frames of the watch."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        linked: BaseException | None = error
        seen: set[int] = set()
        while linked is not None and id(linked) not in seen:
            seen.add(id(linked))
            linked.__traceback__ = _without_watch(linked.__traceback__)
            linked = linked.__cause__ or linked.__context__
        self._hook(kind, error, _without_watch(traceback))


def _without_watch(traceback: TracebackType | None) -> TracebackType | None:
    if traceback is None:
        return None
    rest = _without_watch(traceback.tb_next)
    frame = traceback.tb_frame
    if frame.f_globals is model_watch.__dict__ or frame.f_globals is modules.__dict__:
        return rest  # the watch, and its replacements of methods
    return TracebackType(rest, frame, traceback.tb_lasti, traceback.tb_lineno)
