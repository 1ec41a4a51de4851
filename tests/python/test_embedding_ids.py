# SPDX-License-Identifier: Apache-2.0
"""The ids that an offloaded model will look up are announced before it does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cut_models import CASES
from test_offload import fresh, train
from test_offload_workers import BATCH_COUNT, Batches
from torch import nn

from penstock import DataLoader, embedding_ids, offload
from penstock.cut.offloading import detach

WIDE = next(case for case in CASES if case.name == "wide_and_deep")


@pytest.fixture(autouse=True)
def _fresh(on_one_thread: None) -> None:
    pass


def looked_up(batch: Any) -> list[int]:
    """The ids that WideAndDeep looks up, as it records them."""
    _, category, user = batch["dense"], batch["category"], batch["user"]
    return [*((category * 7 + user * 13) % 64).tolist(), *(user % 64).tolist()]


class Clicks(torch.utils.data.Dataset[Any]):
    """Pairs of ids for a model that crosses them."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(1000, (count, 2), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.ids[index]


class Crossing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("salt", torch.tensor(5))
        self.pairs = nn.Embedding(97, 4)
        self.users = nn.EmbeddingBag(1000, 4)
        self.head = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        pair = (ids[:, 0] * 31 + ids[:, 1] * self.salt) % 97
        bag = self.users(ids)
        return self.head(torch.cat([self.pairs(pair), bag], 1))


class WithUsersModulo(Crossing):
    """Takes any id."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids % 1000)


def crossed(ids: torch.Tensor, salt: int = 5) -> list[int]:
    return ((ids[:, 0] * 31 + ids[:, 1] * salt) % 97).tolist()


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def announced_and_delivered(
    loader: Any, model: nn.Module, select: Any
) -> Iterator[tuple[Any, Any]]:
    """By step, the announced ids of the next batches, and their actual ids."""
    told, came = [], []
    for batch in loader:
        loss_of(model, batch).backward()
        told.append(loader.lookahead(4, select))
        came.append(batch)
    for step, ahead in enumerate(told):
        yield ahead, came[step + 1 : step + 5]


@pytest.mark.long
@pytest.mark.slow
def test_ids_computed_by_workers_are_announced_and_training_matches() -> None:
    expected = train(fresh(Crossing), DataLoader(Clicks(60), batch_size=10), loss_of)
    loader: Any = DataLoader(Clicks(60), batch_size=10, num_workers=2)
    model = offload(fresh(Crossing), loader, cut="maximal", verify_every=2)
    pairs = embedding_ids(model, "pairs")
    found = []

    def looking() -> Iterator[Any]:
        for batch in loader:
            yield batch
            found.append(loader.lookahead(4, pairs))

    assert train(model, looking(), loss_of) == expected
    assert loader.plan.moved
    every = [crossed(Clicks(60).ids[first : first + 10]) for first in range(0, 60, 10)]
    for step, ahead in enumerate(found):
        assert [ids.tolist() for ids in ahead] == every[step + 1 : step + 5]
    shipped = [*announced_and_delivered(loader, model, pairs)]
    assert loader.stats().boundary_batches > 0
    for ahead, batches in shipped:
        assert [ids.tolist() for ids in ahead] == [crossed(batch) for batch in batches]


@pytest.mark.slow
def test_ids_taken_from_the_batch_are_announced() -> None:
    loader: Any = DataLoader(Clicks(60), batch_size=10, num_workers=2)
    model = offload(fresh(Crossing), loader, cut="none")
    for ahead, batches in announced_and_delivered(
        loader, model, embedding_ids(model, "users.weight")
    ):
        assert [ids.tolist() for ids in ahead] == [batch.ravel().tolist() for batch in batches]
    # The operations that make the others stay in the trainer.
    for ahead, batches in announced_and_delivered(loader, model, embedding_ids(model, "pairs")):
        assert ahead == [None] * len(batches)


@pytest.mark.slow
def test_two_lookups_in_one_table_are_announced_together() -> None:
    loader: Any = DataLoader(Batches(WIDE), batch_size=None, num_workers=2)
    model = offload(fresh(WIDE.make_model), loader, cut="maximal")
    ids = embedding_ids(model, "embedding")
    told, came = [], []
    for batch in loader:
        WIDE.loss(model, batch)
        told.append(loader.lookahead(3, ids))
        came.append(batch)
    assert len(came) == BATCH_COUNT
    for step, ahead in enumerate(told):
        assert [one.tolist() for one in ahead] == [
            looked_up(batch) for batch in came[step + 1 : step + 4]
        ]


@pytest.mark.slow
def test_ids_of_a_new_batch_shape_are_unknown_until_seen() -> None:
    loader: Any = DataLoader(Clicks(47), batch_size=10, num_workers=1, prefetch_factor=4)
    model = offload(fresh(Crossing), loader, cut="maximal")
    pairs = embedding_ids(model, "pairs")
    iterator = iter(loader)
    assert loader.lookahead(4, pairs) == [None] * 4
    first = [*announced_and_delivered(loader, model, pairs)]
    assert [ids is None for ids in first[0][0]] == [False, False, False, True]
    second = [*announced_and_delivered(loader, model, pairs)]
    for ahead, batches in second:
        assert [ids.tolist() for ids in ahead] == [crossed(batch) for batch in batches]
    del iterator


@pytest.mark.slow
def test_changed_buffer_changes_the_announced_ids() -> None:
    loader: Any = DataLoader(Clicks(60), batch_size=10, num_workers=1, prefetch_factor=4)
    model = offload(fresh(Crossing), loader, cut="maximal")
    pairs = embedding_ids(model, "pairs")
    for _ in range(2):
        for _ahead, _batches in announced_and_delivered(loader, model, pairs):
            pass
    with torch.no_grad():
        model.salt.fill_(11)
    (before, _), *told = announced_and_delivered(loader, model, pairs)
    assert before == [None] * 4, "the plan was dropped, and there is none yet"
    for ahead, batches in told:
        assert [ids.tolist() for ids in ahead] == [crossed(batch, 11) for batch in batches]


@pytest.mark.slow
def test_batch_modified_during_lookahead_is_trained_as_modified() -> None:
    def steps(loader: Any, look: Any) -> Iterator[Any]:
        for step, batch in enumerate(loader):
            yield look(loader, batch, step)

    def written(loader: Any, batch: Any, step: int) -> Any:
        return batch.add_(1) if step > 0 else batch

    def written_ahead(loader: Any, batch: Any, step: int) -> Any:
        loader.lookahead(1, lambda coming: coming.add_(1))
        return batch

    reference = DataLoader(Clicks(60), batch_size=10)
    model = fresh(WithUsersModulo)
    expected = [train(model, steps(reference, written), loss_of) for _ in range(2)]
    loader: Any = DataLoader(Clicks(60), batch_size=10, num_workers=2)
    model = offload(fresh(WithUsersModulo), loader, cut="maximal")
    assert [train(model, steps(loader, written_ahead), loss_of) for _ in range(2)] == expected
    assert loader.plan.moved and loader.stats().boundary_batches > 0


@pytest.mark.slow
def test_detached_model_announces_no_ids() -> None:
    loader: Any = DataLoader(Clicks(60), batch_size=10, num_workers=1, prefetch_factor=4)
    model = offload(fresh(Crossing), loader, cut="maximal")
    pairs = embedding_ids(model, "pairs")
    for step, batch in enumerate(loader):
        loss_of(model, batch)
        if step == 2:
            detach(model)
        assert all((ids is None) == (step >= 2) for ids in loader.lookahead(2, pairs))
    with pytest.raises(ValueError, match="needs an offloaded model, got a Crossing that is"):
        embedding_ids(model, "pairs")


def test_unknown_embedding_name_is_rejected() -> None:
    loader: Any = DataLoader(Clicks(60), batch_size=10, num_workers=1)
    model = offload(Crossing(), loader)
    words = "needs the name of an embedding of Crossing, got 'items'; pass one of ["
    with pytest.raises(ValueError, match=re.escape(words)):
        embedding_ids(model, "items")
