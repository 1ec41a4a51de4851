# SPDX-License-Identifier: Apache-2.0
"""Reprice the plans of an offloaded model while its loader runs.

csrc/graph/repricer.h decides when a plan changes; this module times calls, and logs and shows
changes.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from penstock import _C
from penstock.cut.live_cut import LiveCut
from penstock.graph.plan import RunningPrice
from penstock.tuning.load_meter import LoadMeter, TrainerClock

logger = logging.getLogger(__name__)

# The replacement of a cut: one that was in use before, or the prices for planning another.
Change = LiveCut | _C.Prices


class Repricer:
    """Prices the plans of one offloaded model with ``cut="auto"``.

    Confined to the training thread.
    """

    def __init__(self, meter: LoadMeter, clock: TrainerClock) -> None:
        self._meter = meter
        self._clock = clock
        self._native = _C.Repricer(meter.native)
        self._previous: LiveCut | None = None  # by the newest change

    def skip_step(self) -> None:
        """Note that this step included planning or a comparison."""
        self._meter.native.skip()

    def run_timed(
        self, cut: LiveCut, run_whole: Callable[[], Any], run_suffix: Callable[[], Any]
    ) -> Any:
        """Run the whole graph or the suffix, and time it if a timed call is due."""
        assert cut.priced is not None
        call = cut.priced.next_timed_call()
        if call is None:
            return run_suffix()
        self._meter.native.skip()
        self._clock.begin((cut.priced, call))
        results = run_whole() if call == "whole" else run_suffix()
        self._clock.end()
        self._take_times()
        if not cut.priced.wants_timed_calls:
            # The trainer was slower than normal, and workers got ahead.
            self._meter.native.forget()
        return results

    def examine(self, cut: LiveCut, weight: int = 1) -> Change | None:
        """Note a call of a cut, or a call that represents `weight` calls; call for each.

        Return the cut that replaces it, if another promises to be better, or has been.
        """
        if cut.priced is None:
            return None
        self._take_times()
        self._native.note_call(cut.priced, weight)
        if self._native.is_window_due and self._native.take_window(self._meter.shared_cpus()):
            logger.debug("measured %s", self._native)
        change = self._native.change_of(cut.priced)
        _show(cut)
        return self._previous if change is True else change

    def changed(self, old: LiveCut, new: LiveCut, where: str) -> None:
        """Note that one cut was replaced by another, which is in force from the next batches on."""
        assert old.priced is not None and new.priced is not None
        is_back = self._native.changed(old.priced, new.priced)
        self._previous = old
        _show(new)
        measured, price = self._native.measured, new.plan.priced
        promised = f"{price.step_s * 1e3:.3g} ms" if price is not None else "shorter"
        logger.info(
            "penstock: the plan changed at %s: %d calls move instead of %d; a step took %.3g ms "
            "(%.3g ms of the trainer, %.3g ms of one of %d workers) and %s",
            where,
            len(new.plan.moved),
            len(old.plan.moved),
            measured.step_s * 1e3,
            measured.trainer_s * 1e3,
            measured.fetch_s * 1e3,
            measured.workers,
            "was shorter before" if is_back else f"should take {promised}",
        )

    def give_up(self, cut: LiveCut) -> None:
        """Note that the other plan cannot be implemented."""
        if cut.priced is not None:
            self._native.give_up(cut.priced)
            _show(cut)

    def _take_times(self) -> None:
        """Note the timed calls that a device has finished."""
        for (priced, call), seconds in self._clock.take():
            priced.note_timed_call(call, seconds)


def _show(cut: LiveCut) -> None:
    """Put the newest price into the plan that the loader shows."""
    shown = cut.priced.shown if cut.priced is not None else None
    if shown is None:
        return
    price = RunningPrice(
        times=shown.times,
        changes=shown.changes,
        trainer_s=shown.trainer_s,
        worker_s=shown.worker_s,
        worker_count=int(shown.workers),
        link_s=shown.link_s,
        step_s=shown.step_s,
        is_held=shown.is_held,
    )
    if price != cut.plan.priced:
        cut.plan = dataclasses.replace(cut.plan, priced=price)
