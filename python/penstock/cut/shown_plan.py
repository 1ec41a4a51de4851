# SPDX-License-Identifier: Apache-2.0
"""The plan that a loader shows for one offloaded model, and its log lines."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from penstock.cut.model_call import ModelCall
from penstock.graph.plan import Plan, joined
from penstock.graph.plan_table import verdict
from penstock.tracking.loader_use import LoaderUse

logger = logging.getLogger(__name__)


class PlanHost(Protocol):
    """The part of a loader that shows plans."""

    def _show_plan(self, plan: Plan | None) -> None: ...


class ShownPlan:
    """Confined to the training thread."""

    def __init__(
        self, name: str, user: int, host: Callable[[], PlanHost | None], use: LoaderUse
    ) -> None:
        """``name`` is the offloaded model's for people, ``user`` the id of its context."""
        self._name = name
        self._user = user
        self._host = host
        self._use = use
        self._is_told = False  # that something moves
        self._reasons: set[str] = set()  # refusals that were logged
        self._calls_by_rows: Counter[int | None] = Counter()  # of their batches
        self._made_of: list[Plan] = []  # the plans of the graphs of one call

    @property
    def is_one_graph(self) -> bool:
        """Whether the last calls ran as one captured graph, as far as they knew the batch."""
        return len(self._made_of) <= 1

    def note_call(self, call: ModelCall) -> None:
        """To be called after each call of the model: its plan is that of all graphs that ran."""
        if call.plans and self._is_of_usual_batch(call) and not self._is_made_of(call.plans):
            self._made_of = call.plans
            self.publish(joined(call.plans))

    def _is_made_of(self, plans: list[Plan]) -> bool:
        shown = self._made_of
        return len(shown) == len(plans) and all(map(_are_same, shown, plans))

    def _is_of_usual_batch(self, call: ModelCall) -> bool:
        """Whether most calls so far were given batches of as many rows as this one's.

        The last batch of an epoch is often smaller, and its plan would hide the one of all others.
        """
        rows = None if call.batch is None else call.batch.rows
        self._calls_by_rows[rows] += 1
        return self._calls_by_rows[rows] >= max(self._calls_by_rows.values())

    def publish(self, plan: Plan) -> None:
        """Makes `plan` the model's plan in force. A refusal never hides a plan that moves
        something."""
        shown = self._use.plan_of(self._user)
        if plan.refused is None or shown is None or shown.refused is not None:
            self.show(plan)
        if plan.moved and not self._is_told:
            self._is_told = True
            logger.info("penstock: %s print(loader.plan) shows which", verdict(plan))

    def refuse(self, reason: str) -> None:
        """Notes that a captured graph stays whole."""
        if reason not in self._reasons:
            self._reasons.add(reason)
            logger.warning("penstock: nothing of %s moves to the workers: %s", self._name, reason)
        self.publish(Plan(refused=reason))

    def note_idle(self, reason: str) -> None:
        """Notes that no graph runs any more, so that no plan is in force."""
        self._made_of = []
        self.show(None)
        self.refuse(reason)

    def show(self, plan: Plan | None) -> None:
        """Makes the loader's plan that of all of its models, of which this one has `plan`."""
        plan_of_all = self._use.set_plan(self._user, plan)
        host = self._host()
        if host is not None:
            host._show_plan(plan_of_all)


def _are_same(a: Plan, b: Plan) -> bool:
    return a is b
