# SPDX-License-Identifier: Apache-2.0
"""The state that the offloaded models of one loader share: its plan, and the prefixes in its
workers.

Models with the same preprocessing, such as a teacher and a student, have the same prefix. It stays
with the workers until the last model that uses it lets go.
"""

from __future__ import annotations

from collections.abc import Set

from penstock.graph.plan import Plan, joined


class LoaderUse:
    """Confined to the training thread. A user is an offloaded model, by the id of its context."""

    def __init__(self) -> None:
        self._plans: dict[int, Plan] = {}  # by user, in the order of their first plans
        self._users_of_prefix: dict[str, set[int]] = {}
        self._users_of_meter: set[int] = set()

    def take_prefix(self, user: int, prefix: str) -> bool:
        """Notes that `user` needs this one; returns whether nobody did before."""
        users = self._users_of_prefix.setdefault(prefix, set())
        users.add(user)
        return len(users) == 1

    def drop_prefixes(self, user: int, prefixes: Set[str]) -> set[str]:
        """Notes that `user` needs these no more; returns those that nobody needs now."""
        unused = set()
        for prefix in prefixes:
            users = self._users_of_prefix.get(prefix, set())
            users.discard(user)
            if not users:
                self._users_of_prefix.pop(prefix, None)
                unused.add(prefix)
        return unused

    def take_meter(self, user: int) -> None:
        self._users_of_meter.add(user)

    def drop_meter(self, user: int) -> bool:
        """Notes that `user` needs no measurements; returns whether nobody does now."""
        self._users_of_meter.discard(user)
        return not self._users_of_meter

    def set_plan(self, user: int, plan: Plan | None) -> Plan | None:
        """Notes the plan of one model; returns the plan of the loader, which is that of all of its
        models. Models that were refused count only where there is no other.
        """
        if plan is None:
            self._plans.pop(user, None)
        else:
            self._plans[user] = plan
        moving = [one for one in self._plans.values() if one.refused is None]
        if moving:
            return joined(moving)
        return next(reversed(self._plans.values()), None)

    def plan_of(self, user: int) -> Plan | None:
        return self._plans.get(user)
