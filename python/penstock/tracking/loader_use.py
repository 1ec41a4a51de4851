# SPDX-License-Identifier: Apache-2.0
"""The state that the offloaded models of one loader share: its plan, and the prefixes in its
workers.

Models with the same preprocessing, such as a teacher and a student, have the same prefix. It stays
with the workers until the last model that uses it lets go.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Set

from penstock.graph.plan import Plan, joined

logger = logging.getLogger(__name__)

# So many batches without a call of the model that workers compute for are told of.
IDLE_BATCHES_MAX = 64


class LoaderUse:
    """Confined to the training thread. A user is an offloaded model, by a number of its own."""

    def __init__(self) -> None:
        self._user_count = 0
        self._plans: dict[int, Plan] = {}  # by user, in the order of their first plans
        self._users_of_prefix: dict[str, set[int]] = {}
        self._users_of_meter: set[int] = set()
        self._names: dict[int, str] = {}  # by user, for people
        self._idle_batches: Counter[int] = (
            Counter()
        )  # by user that has prefixes, since its last call

    def new_user(self) -> int:
        """The number of one more offloaded model."""
        self._user_count += 1
        return self._user_count

    def note_call(self, user: int, name: str) -> None:
        """To be called when the model `user` is called, which people know as `name`."""
        self._names[user] = name
        self._idle_batches.pop(user, None)

    def note_batch(self) -> None:
        """To be called for each batch of the loader. Says so once where workers go on for a model
        that nobody calls, as for one of which the program trains a copy."""
        for user in {user for users in self._users_of_prefix.values() for user in users}:
            self._idle_batches[user] += 1
            if self._idle_batches[user] == IDLE_BATCHES_MAX:
                logger.warning(
                    "penstock: %d batches in a row came with results that workers had computed "
                    "for %s, "
                    "which was not called; a copy of a model (copy.deepcopy, pickle) is not "
                    "offloaded: call penstock.offload(copy, loader) to train that one, and "
                    "penstock.detach(model) when a model is of no more use",
                    IDLE_BATCHES_MAX,
                    self._names.get(user, "a model").rstrip(","),
                )

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

    def drop_prefixes_of(self, user: int) -> set[str]:
        """Notes that `user` is gone; returns the prefixes that nobody needs now."""
        self._names.pop(user, None)
        self._idle_batches.pop(user, None)
        prefixes = {prefix for prefix, users in self._users_of_prefix.items() if user in users}
        return self.drop_prefixes(user, prefixes)

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
