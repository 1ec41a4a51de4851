# SPDX-License-Identifier: Apache-2.0
"""The commits of one loader, and where the objects that a program commits are from.

A batch is found by its tensors, or by the object itself, which are held weakly.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from penstock.stream.commits import BatchId, OpenEpoch, PulledBatch
from penstock.stream.places import DeliveredPlaces, PlacesLeft
from penstock.stream.progress import Progress
from penstock.tracking.leaves import flatten_batch

_LISTED_MAX = 5  # ids in a message


class CommitLedger:
    """The commits of one loader. Thread-safe, so that other threads may commit."""

    def __init__(self, title: str) -> None:
        """``title`` is the loader's name in messages."""
        self.lock = threading.RLock()
        self.title = title
        self.last: BatchId | None = None  # delivered
        self.epoch: OpenEpoch | None = None  # the newest
        self.earlier: dict[int, OpenEpoch] = {}  # with outstanding batches
        self.next_number = 0
        self.to_repeat: list[OpenEpoch] = []  # of a loaded state, before the epoch that it is in
        self.generation = 0  # loaded states so far
        self.reshard_count = 0  # changes of the number of ranks so far

    # The stream.

    def begin_epoch(self, progress: Progress) -> OpenEpoch:
        """Start the account of an epoch. The one before is over, or was abandoned."""
        with self.lock:
            self.archive()
            self.epoch = OpenEpoch(self, self.next_number, DeliveredPlaces(progress.left))
            self.next_number += 1
            return self.epoch

    def archive(self) -> None:
        """Move the newest epoch to the earlier ones, if it has outstanding batches."""
        with self.lock:
            epoch, self.epoch = self.epoch, None
            if epoch is not None and epoch.outstanding:
                epoch.keep_outstanding()
                self.earlier[epoch.number] = epoch

    def note_delivery(self, epoch: OpenEpoch, place: int, batch: Any) -> None:
        """Note that the program receives ``batch``."""
        name = BatchId(epoch.number, place)
        with self.lock:
            epoch.outstanding.add(place)
            self.last = name
            _note_origin(batch, _Origin(weakref.ref(self), self.generation, name))

    # The program.

    @property
    def outstanding(self) -> tuple[BatchId, ...]:
        """Return the batches that were delivered and not committed, oldest first."""
        with self.lock:
            return tuple(
                BatchId(epoch.number, place)
                for epoch in self._open_epochs()
                for place in sorted(epoch.outstanding)
            )

    def id_of(self, batch: Any) -> BatchId:
        """Return the id of a batch that was delivered. Raises ValueError if that is not known."""
        found = _origins(batch)
        own = [part for origins in found if (part := [o for o in origins if o.ledger() is self])]
        if not own:
            raise ValueError(_unknown(batch, [one for part in found for one in part], self.title))
        current = [[one.name for one in part if one.generation == self.generation] for part in own]
        common = set.intersection(*map(set, current))
        if not any(current):
            raise ValueError(
                f"batch {own[0][0].name} was delivered before load_state_dict(), which began "
                f"another stream; commit the batches that were delivered since"
            )
        if not common:
            raise ValueError(
                f"the batch must be one batch, got parts of several, such as "
                f"{_listed(dict.fromkeys(name for part in current for name in part))}; commit each"
            )
        with self.lock:
            names = sorted(one for one in common if self.is_outstanding(one)) or [max(common)]
        if len(names) > 1:
            raise ValueError(
                f"the batch is outstanding {len(names)} times, as {_listed(names)}, since the "
                f"dataset returned the same object for each; commit the ids that "
                f"batch_id() returned after each next()"
            )
        return names[0]

    def commit(self, batch: Any) -> None:
        """Commit a batch, or the batch with an id. Raises ValueError if it is not outstanding."""
        name = batch if type(batch) is BatchId else self.id_of(batch)
        with self.lock:
            epoch = self._epoch(name.epoch)
            if epoch is None or name.batch not in epoch.outstanding:
                raise ValueError(self._not_outstanding(name, epoch))
            epoch.commit(name.batch)
            if epoch is not self.epoch and not epoch.pulled:
                del self.earlier[name.epoch]

    def commit_all(self) -> None:
        """Commit all outstanding batches."""
        with self.lock:
            for epoch in self._open_epochs():
                for place in list(epoch.outstanding):
                    epoch.commit(place)
            self.earlier = {number: one for number, one in self.earlier.items() if one.pulled}

    def _open_epochs(self) -> list[OpenEpoch]:
        newest = [] if self.epoch is None else [self.epoch]
        return [*(self.earlier[number] for number in sorted(self.earlier)), *newest]

    def _epoch(self, number: int) -> OpenEpoch | None:
        if self.epoch is not None and self.epoch.number == number:
            return self.epoch
        return self.earlier.get(number)

    def is_outstanding(self, name: BatchId) -> bool:
        epoch = self._epoch(name.epoch)
        return epoch is not None and name.batch in epoch.outstanding

    def _not_outstanding(self, name: BatchId, epoch: OpenEpoch | None) -> str:
        if epoch is not None:
            left = epoch.places.left()
            is_left = name.batch >= left.through or name.batch in left.missing
        else:
            is_left = name.epoch >= self.next_number
        if is_left:
            return (
                f"{name} must be a batch that was delivered, and not since this loader or its "
                f"state was made; commit it after next() has returned it"
            )
        return f"{name} is committed already; commit each batch once"

    # The state.

    def to_state(self, is_between: bool) -> dict[str, Any]:
        """Return the part of the loader's state about earlier epochs. With ``is_between`` the
        newest epoch is one of them."""
        with self.lock:
            epochs = [*self.earlier.values()]
            newest = self.epoch
            if newest is not None and is_between and newest.outstanding:
                newest.keep_outstanding()
                epochs.append(newest)
            number = self.next_number
            if newest is not None and not is_between:
                number = newest.number
            return {"epoch": number, "earlier": [_epoch_to_state(one) for one in epochs]}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Continue from the part that to_state() returned; None forgets all commits."""
        with self.lock:
            self.generation += 1
            self.last = self.epoch = None
            state = {"epoch": 0, "earlier": ()} if state is None else state
            self.next_number = state["epoch"]
            self.to_repeat = [_epoch_of_state(self, one) for one in state["earlier"]]
            self.earlier = {one.number: one for one in self.to_repeat}


def _epoch_to_state(epoch: OpenEpoch) -> dict[str, Any]:
    return {
        "epoch": epoch.number,
        "seed_epoch": epoch.seed_epoch,
        "base_seed": epoch.base_seed,
        "batches": [[place, one.first_place, one.index] for place, one in epoch.pulled.items()],
    }


def _epoch_of_state(ledger: CommitLedger, state: Mapping[str, Any]) -> OpenEpoch:
    pulled = {
        place: PulledBatch(index, first_place) for place, first_place, index in state["batches"]
    }
    left = PlacesLeft(max(pulled) + 1, tuple(sorted(pulled)))
    return OpenEpoch(
        ledger,
        state["epoch"],
        DeliveredPlaces(left),
        state["seed_epoch"],
        state["base_seed"],
        pulled=pulled,
    )


class _Origin(NamedTuple):
    ledger: weakref.ref[CommitLedger]
    generation: int
    name: BatchId


# Where the objects that programs hold are from, in all loaders of this process. The lock guards
# both: loaders may be read on several threads.
_tensors: Any = WeakTensorKeyDictionary()
_objects: Any = WeakIdKeyDictionary()
_origins_lock = threading.Lock()


def _tables(batch: Any) -> list[tuple[Any, Any]]:
    """Return the keys by which a batch is found again, each with its table."""
    keys = [(_tensors, leaf) for leaf in flatten_batch(batch)]
    if not isinstance(batch, torch.Tensor) and type(batch).__weakrefoffset__ != 0:
        keys.append((_objects, batch))
    return keys


def _note_origin(batch: Any, origin: _Origin) -> None:
    """Note where a batch is from. Of the same object's earlier deliveries, which a dataset in this
    process may repeat in each epoch, keep the outstanding ones."""

    def is_kept(one: _Origin) -> bool:
        owner = one.ledger()
        return owner is not None and (
            owner is not origin.ledger() or owner.is_outstanding(one.name)
        )

    with _origins_lock:
        for table, key in _tables(batch):
            table[key] = (*filter(is_kept, table.get(key, ())), origin)


def _origins(batch: Any) -> list[tuple[_Origin, ...]]:
    """Return where each part of ``batch`` is from."""
    with _origins_lock:
        return [table.get(key, ()) for table, key in _tables(batch)]


def _unknown(batch: Any, origins: list[_Origin], title: str) -> str:
    other = next((ledger for one in origins if (ledger := one.ledger()) is not None), None)
    if other is not None:
        return (
            f"the batch was delivered by the loader {other.title}, not by {title}; commit it to "
            f"the loader that delivered it"
        )
    return (
        f"the batch must be one that {title} delivered, or a tensor of it, got {_kind(batch)} that "
        f"it did not deliver; pass the batch as next() returned it (not a copy, as .to(device) "
        f"makes), or the id that batch_id() returned after next()"
    )


def _kind(batch: Any) -> str:
    return "None" if batch is None else f"a {type(batch).__name__}"


def _listed(names: Iterable[BatchId]) -> str:
    texts = [str(tuple(one)) for one in names]
    more = "" if len(texts) <= _LISTED_MAX else f" and {len(texts) - _LISTED_MAX} more"
    return ", ".join(texts[:_LISTED_MAX]) + more


_automatic: weakref.WeakSet[CommitLedger] = weakref.WeakSet()
_hooks: list[Any] = []  # the handle, once there is one


def commit_after_steps(ledger: CommitLedger) -> None:
    """Commit all that a loader delivered whenever an optimizer of torch has made a step."""
    _automatic.add(ledger)
    if not _hooks:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        _hooks.append(register_optimizer_step_post_hook(_commit_all))


def _commit_all(*of_step: Any) -> None:
    for ledger in list(_automatic):
        ledger.commit_all()
