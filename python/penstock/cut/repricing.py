# SPDX-License-Identifier: Apache-2.0
"""Prices the plans of an offloaded model again while its loader runs.

Calibration times the operators alone. Which side of the pipeline is the slower one shows only when
the pipeline runs. So a window of steps is measured. The part of it that the plan explains is taken
off, and the rest is the load for which another plan may be better (csrc/graph/price.h). A few calls
of the graph as a whole are timed for that, in turns with calls of its suffix. The difference is the
trainer's gain by the cut, with its own allocator and threads. When the loads shift later, plans are
priced again.

Changes of plans are bounded:

- A new plan must promise steps that are shorter by GAIN_MIN.
- A new plan is taken back when its steps turn out to be longer at once, or when the measurements of
  one of its first TRIAL_WINDOWS windows say that steps would be shorter with the plan before.
- After a plan was taken back the graph keeps its plan until the loads have shifted.
- A plan that was left is not taken again until the loads have shifted.
- The plan of a graph changes CHANGES_MAX times at most.

The losses are the same with every plan, so a change shows in speed alone.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

from penstock import _C
from penstock.cut.cut_pricing import clamped_scale
from penstock.cut.live_cut import LiveCut
from penstock.tuning.load_meter import LoadMeter, MeasuredLoads
from penstock.tuning.trainer_clock import TrainerClock

logger = logging.getLogger(__name__)

WINDOW_STEPS = 24
WINDOW_S = 0.5  # and at least this long: what else a machine does comes in bursts
# How many times longer or shorter a load must be in so many windows in a row to count as shifted.
SHIFT = 1.5
SHIFTED_WINDOWS = 2
NOTICEABLE = 0.1  # of a step: what is below it never counts as shifted
GAIN_MIN = 0.03  # of a step, promised
LOSS_MAX = 0.03  # of a step, measured, and twice its standard error
RETURN_MIN = 0.03  # of a step, promised by the plan before, once the new one was measured
CHANGES_MAX = 8  # of one graph's plan
TRIAL_WINDOWS = 4  # in each of which it may be taken back


@dataclass(frozen=True, slots=True)
class _Basis:
    """Loads as they were when plans were priced last."""

    trainer_s: float
    worker_s: float
    prefix_scale: float
    workers: int
    step_s: float

    def has_shifted(self, now: _Basis) -> bool:
        floor = NOTICEABLE * max(self.step_s, now.step_s)
        pairs = [(self.trainer_s, now.trainer_s), (self.worker_s, now.worker_s)]
        ratios = [max(b, floor) / max(a, floor) for a, b in pairs]
        ratios.append(now.prefix_scale / self.prefix_scale)
        return self.workers != now.workers or any(not 1 / SHIFT < ratio < SHIFT for ratio in ratios)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A plan that was changed to, until it has shown how long its steps are."""

    old: LiveCut
    new: LiveCut
    before: MeasuredLoads
    basis: _Basis
    windows_left: int = TRIAL_WINDOWS


# The replacement of a cut: one that was in use before, or the prices that another is planned for.
Change = LiveCut | _C.Prices


class Repricer:
    """Of one offloaded model with ``cut="auto"``. Confined to the training thread."""

    def __init__(self, meter: LoadMeter, clock: TrainerClock) -> None:
        self._meter = meter
        self._clock = clock
        self._worker_scale = 1.0
        self._basis: _Basis | None = None
        self._now: tuple[MeasuredLoads, _Basis] | None = None
        self._shifted_windows = 0
        self._trial: _Trial | None = None
        self._called: list[tuple[LiveCut, int]] = []  # since the last window, and how often
        self._due: list[LiveCut] = []  # to be priced when they are called next

    def note_odd_step(self) -> None:
        """Something was planned or compared in this step."""
        self._meter.skip()

    def run_spot(self, cut: LiveCut, run_whole: Any, run_suffix: Any) -> Any:
        """Runs the graph, one way or the other, and may time it."""
        assert cut.pricing is not None
        label = cut.pricing.next_spot()
        if label is None:
            return run_suffix()
        self._meter.skip()
        self._clock.begin(label)
        results = run_whole() if label == "whole" else run_suffix()
        self._clock.end()
        cut.pricing.note_spots(self._clock.take())
        if not cut.pricing.wants_spots:
            self._meter.forget()  # the trainer was slower than it will be, and workers got ahead
        return results

    def look_at(self, cut: LiveCut, weight: int = 1) -> Change | None:
        """To be called for each call of a cut, or for one that stands for so many; returns what it
        is to be replaced by, if anything promises to be better, or has been."""
        pricing = cut.pricing
        if pricing is None:
            return None
        self._note_call(cut, weight)
        if self._meter.has_seen(WINDOW_STEPS, WINDOW_S):
            self._take_window()
        if not any(cut is item for item in self._due):
            return None
        if self._trial is not None and self._trial.new is not cut:
            return None  # it waits for the verdict on that one
        self._due = [item for item in self._due if item is not cut]
        if self._trial is not None:
            back = self._judge(self._trial)
            if back is not None or self._trial is not None:
                return back
        return self._price(cut)

    def changed(self, old: LiveCut, new: LiveCut, where: str) -> None:
        """One cut was replaced by another, which is in force from the next batches on."""
        pricing = new.pricing
        assert pricing is not None and self._now is not None
        pricing.changes += 1
        is_back = self._trial is not None and self._trial.old is new
        measured, basis = self._now
        self._trial = None if is_back else _Trial(old, new, measured, basis)
        if not is_back:
            pricing.left.append(_moved(old))
            pricing.begin_spots()
        self._due = []
        self._called = []
        self._meter.forget()
        self._show(new)
        price = new.plan.priced
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
        """The other plan cannot be carried out."""
        if cut.pricing is not None:
            cut.pricing.is_held = True
            self._show(cut)

    def _note_call(self, cut: LiveCut, weight: int) -> None:
        for index, (item, count) in enumerate(self._called):
            if item is cut:
                self._called[index] = (cut, count + weight)
                return
        self._called.append((cut, weight))

    def _take_window(self) -> None:
        """Looks at what was measured, and notes whose price is due."""
        # A cut of few calls, such as that of a smaller last batch, has no say in how long a step
        # takes.
        cuts = [cut for cut, count in self._called if 2 * count >= self._meter.step_count]
        moving = [cut for cut in cuts if cut.suffix is not None]
        if any(cut.pricing is not None and cut.pricing.wants_spots for cut in moving):
            return
        measured = self._meter.measured(needs_boundary=bool(moving))
        self._meter.clear()
        self._called = []
        if measured is None or not cuts:
            return
        for cut in moving:
            assert cut.pricing is not None
            cut.pricing.note_spots(self._clock.take())
            cut.pricing.learn_scale(cut.planned.native, measured.workers)
        planned_s = sum(_seconds(cut, measured.workers, 1.0).worker_s for cut in moving)
        if planned_s > 0 and measured.prefix_s > 0:
            self._worker_scale = clamped_scale(measured.prefix_s / planned_s)
        trainer_s = sum(
            _seconds(cut, measured.workers, self._worker_scale).trainer_s for cut in cuts
        )
        basis = _Basis(
            trainer_s=max(0.0, measured.trainer_s - trainer_s),
            worker_s=max(0.0, measured.fetch_s - measured.prefix_s),
            prefix_scale=self._worker_scale,
            workers=measured.workers,
            step_s=measured.step_s,
        )
        self._now = (measured, basis)
        logger.debug("measured %s; beside the plan %s", measured, basis)
        if self._trial is not None and not any(cut is self._trial.new for cut in cuts):
            self._trial = None  # it was dropped, and planned anew
        has_shifted = self._basis is not None and self._basis.has_shifted(basis)
        self._shifted_windows = self._shifted_windows + 1 if has_shifted else 0
        if self._shifted_windows >= SHIFTED_WINDOWS:
            for cut in cuts:
                assert cut.pricing is not None
                cut.pricing.left.clear()
                cut.pricing.is_held = False
        if (
            self._basis is None
            or self._trial is not None
            or self._shifted_windows >= SHIFTED_WINDOWS
        ):
            self._basis = basis
            self._shifted_windows = 0
            self._due = list(cuts)

    def _judge(self, trial: _Trial) -> Change | None:
        """Whether steps are shorter with the plan that was changed to, or not longer at least."""
        assert self._now is not None
        measured, basis = self._now
        self._trial = None
        more_s = measured.step_s - trial.before.step_s
        error_s = (measured.step_error_s**2 + trial.before.step_error_s**2) ** 0.5
        is_first = trial.windows_left == TRIAL_WINDOWS  # later the machine may have changed, too
        is_worse = is_first and more_s > max(LOSS_MAX * trial.before.step_s, 2 * error_s)
        # Or are they longer for another reason than the plan? What workers take beside it tells.
        beside = dataclasses.replace(
            basis, trainer_s=trial.basis.trainer_s, prefix_scale=trial.basis.prefix_scale
        )
        if not (is_worse and not trial.basis.has_shifted(beside)) and not self._was_mispriced(
            trial
        ):
            # Of a plan that moves nothing no later window knows more.
            left = trial.windows_left - 1 if trial.new.suffix is not None else 0
            self._trial = dataclasses.replace(trial, windows_left=left) if left else None
            return None
        assert trial.new.pricing is not None
        trial.new.pricing.is_held = True
        self._trial = trial  # until `changed` has seen that it goes back
        return trial.old

    def _was_mispriced(self, trial: _Trial) -> bool:
        """Whether the plan before promises shorter steps than the one that was changed to, now that
        it is measured what that costs the workers and saves the trainer. All of it is of one
        window, so that a machine that became slower or faster between two has no say."""
        prices = self._prices(trial.new)
        steps = []
        for cut in (trial.old, trial.new):
            native = cut.planned.native
            assert native is not None
            steps.append(native.step(native.chosen, prices).step_s)
        return steps[0] < steps[1] * (1 - RETURN_MIN)

    def _prices(self, cut: LiveCut) -> _C.Prices:
        """The prices while `cut` is in force."""
        pricing, native = cut.pricing, cut.planned.native
        assert pricing is not None and native is not None and self._now is not None
        measured, _ = self._now
        prices = _C.Prices.of_local_workers(
            measured.workers, pricing.trainer_scale, self._worker_scale
        )
        seconds = native.seconds(native.chosen, prices)
        has_enough_cpus = measured.cpus > measured.workers
        loads = _C.Loads(
            trainer_s=max(0.0, measured.trainer_s - seconds.trainer_s),
            worker_s=max(0.0, measured.fetch_s - seconds.worker_s),
            cpus=0 if has_enough_cpus else measured.cpus,
        )
        return prices.with_loads(loads)

    def _price(self, cut: LiveCut) -> _C.Prices | None:
        pricing, native = cut.pricing, cut.planned.native
        assert pricing is not None and native is not None
        prices = self._prices(cut)
        pricing.times += 1
        self._show(cut, prices)
        if pricing.is_held or pricing.changes >= CHANGES_MAX:
            return None
        other = native.chosen_by(prices)
        assert other.step_s is not None and cut.plan.priced is not None
        moved = frozenset(group.group for group in other.moved)
        if moved == _moved(cut) or moved in pricing.left:
            return None
        if other.step_s > cut.plan.priced.step_s * (1 - GAIN_MIN):
            return None
        return prices

    def _show(self, cut: LiveCut, prices: _C.Prices | None = None) -> None:
        """Puts the price into the plan that the loader shows: by other prices, by those that the
        plan was made by, or what it was before."""
        native, pricing = cut.planned.native, cut.pricing
        assert native is not None and pricing is not None
        prices = prices or native.prices
        price = cut.plan.priced
        if prices.loads is not None:
            price = native.step(native.chosen, prices)
        if price is not None:
            price = dataclasses.replace(
                price, times=pricing.times, changes=pricing.changes, is_held=pricing.is_held
            )
            cut.plan = dataclasses.replace(cut.plan, priced=price)


def _seconds(cut: LiveCut, workers: int, worker_scale: float) -> Any:
    native, pricing = cut.planned.native, cut.pricing
    assert native is not None and pricing is not None
    prices = _C.Prices.of_local_workers(workers, pricing.trainer_scale, worker_scale)
    return native.seconds(native.chosen, prices)


def _moved(cut: LiveCut) -> frozenset[int]:
    native = cut.planned.native
    return frozenset(group.group for group in native.chosen.moved) if native else frozenset()
