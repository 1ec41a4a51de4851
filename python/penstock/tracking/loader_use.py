# SPDX-License-Identifier: Apache-2.0
"""Hold the state shared by a loader's offloaded models: its plan, and its workers' prefixes.

Models with the same preprocessing, such as a teacher and a student, have the same prefix. It stays
with the workers until the last model that uses it drops it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Set

from penstock.graph.plan import Plan, joined

logger = logging.getLogger(__name__)

# After this many batches without a call of the model that workers compute for, a warning is logged.
IDLE_BATCHES_MAX = 64


class LoaderUse:
    """The models offloaded to one loader. Confined to the training thread.

    A user is an offloaded model, identified by a unique number.
    """

    def __init__(self) -> None:
        self._user_count = 0
        self._plans: dict[int, Plan] = {}  # by user, in the order of their first plans
        self._users_of_prefix: dict[str, set[int]] = {}
        self._users_of_meter: set[int] = set()
        self._names: dict[int, str] = {}  # by user, for messages
        self._idle_batches: Counter[int] = (
            Counter()
        )  # by user that has prefixes, since its last call

    def new_user(self) -> int:
        """Return the number of another offloaded model."""
        self._user_count += 1
        return self._user_count

    def note_call(self, user: int, name: str) -> None:
        """Note a call of the model `user`, whose name for users is `name`; call for each."""
        self._names[user] = name
        self._idle_batches.pop(user, None)

    def note_batch(self) -> None:
        """Note a batch of the loader; call for each.

        Warns once if workers continue to compute for a model that is not called, as when the
        program trains a copy of it.
        """
        for user in {user for users in self._users_of_prefix.values() for user in users}:
            self._idle_batches[user] += 1
            if self._idle_batches[user] == IDLE_BATCHES_MAX:
                logger.warning(
                    "penstock: %d batches in a row contained results that workers had computed "
                    "for %s, "
                    "which was not called; a copy of a model (copy.deepcopy, pickle) is not "
                    "offloaded: call penstock.offload(copy, loader) to train the copy, and "
                    "penstock.detach(model) when a model is no longer used",
                    IDLE_BATCHES_MAX,
                    self._names.get(user, "a model").rstrip(","),
                )

    def take_prefix(self, user: int, prefix: str) -> bool:
        """Note that `user` needs this prefix; return whether it is the first user."""
        users = self._users_of_prefix.setdefault(prefix, set())
        users.add(user)
        return len(users) == 1

    def drop_prefixes(self, user: int, prefixes: Set[str]) -> set[str]:
        """Note that `user` no longer needs these; return the prefixes that are now unused."""
        unused = set()
        for prefix in prefixes:
            users = self._users_of_prefix.get(prefix, set())
            users.discard(user)
            if not users:
                self._users_of_prefix.pop(prefix, None)
                unused.add(prefix)
        return unused

    def drop_prefixes_of(self, user: int) -> set[str]:
        """Note that `user` was deleted; return the prefixes that are now unused."""
        self._names.pop(user, None)
        self._idle_batches.pop(user, None)
        prefixes = {prefix for prefix, users in self._users_of_prefix.items() if user in users}
        return self.drop_prefixes(user, prefixes)

    def take_meter(self, user: int) -> None:
        self._users_of_meter.add(user)

    def drop_meter(self, user: int) -> bool:
        """Note that `user` needs no measurements; return whether they are now unused."""
        self._users_of_meter.discard(user)
        return not self._users_of_meter

    def set_plan(self, user: int, plan: Plan | None) -> Plan | None:
        """Note the plan of one model; return the plan of the loader, which covers all its models.

        Refused models count only if there are no others.
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
