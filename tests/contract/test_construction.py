# SPDX-License-Identifier: Apache-2.0
"""The constructor, attributes and lengths, which frameworks read, change and use to make
loaders."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from functools import partial
from typing import Any

import pytest
import torch
from sample_datasets import Computed, Streamed, as_is, number
from stream_oracle import error_text, without_frames
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.dataloader import _DatasetKind, _InfiniteConstantSampler

TORCH = torch.utils.data.DataLoader
STREAM = Streamed(partial(range, 4))
ROWS = [1, 2, 3, 4, 5]

BAD_ARGUMENTS: dict[str, dict[str, Any]] = {
    "fewer than no workers": {"num_workers": -1},
    "negative timeout": {"timeout": -1},
    "prefetch without workers": {"prefetch_factor": 2},
    "negative prefetch": {"num_workers": 1, "prefetch_factor": -1},
    "persistence without workers": {"persistent_workers": True},
    "context without workers": {"multiprocessing_context": "fork"},
    "unknown context": {"num_workers": 1, "multiprocessing_context": "teleport"},
    "context of a wrong type": {"num_workers": 1, "multiprocessing_context": object()},
    "shuffled stream": {"dataset": STREAM, "shuffle": True},
    "stream with a sampler": {"dataset": STREAM, "sampler": [1]},
    "stream with a batch sampler": {"dataset": STREAM, "batch_sampler": [[1]]},
    "sampler and shuffle": {"sampler": [1], "shuffle": True},
    "batch sampler and batch size": {"batch_sampler": [[1]], "batch_size": 2},
    "batch sampler and shuffle": {"batch_sampler": [[1]], "shuffle": True},
    "batch sampler and sampler": {"batch_sampler": [[1]], "sampler": [1]},
    "batch sampler and drop_last": {"batch_sampler": [[1]], "drop_last": True},
    "no batches and drop_last": {"batch_size": None, "drop_last": True},
    "batch size 0": {"batch_size": 0},
    "batch size of a wrong type": {"batch_size": 2.5},
    "batch size True": {"batch_size": True},
    "drop_last of a wrong type": {"drop_last": 1},
    "nothing to shuffle": {"dataset": [], "shuffle": True},
    "no dataset": {"dataset": None, "shuffle": True},
    "unknown option": {"color": "red"},
}


def construct(loader_class: type, arguments: dict[str, Any]) -> tuple[str, str, str]:
    try:
        loader_class(**{"dataset": ROWS, **arguments})
    except Exception as error:
        kind, _, _ = error_text(error)
        return (kind, str(error).replace(loader_class.__module__, "M"), "")
    return ("no error", "", "")


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_argument_raises_the_error_of_torch(loader_class: type, name: str) -> None:
    got = construct(loader_class, BAD_ARGUMENTS[name])
    assert got == construct(TORCH, BAD_ARGUMENTS[name])
    assert got[0] != "no error"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("prefetch 0", {"num_workers": 1, "prefetch_factor": 0}),
        ("timeout without workers", {"timeout": 1}),
    ],
)
def test_some_bad_arguments_are_rejected_only_by_iter(
    loader_class: type, name: str, options: dict[str, Any]
) -> None:
    def iterate(cls: type) -> tuple[str, str, str]:
        try:
            iter(cls(ROWS, **options))
        except AssertionError as error:
            without_frames(error)
            return error_text(error)
        return ("no error", "", "")

    assert iterate(loader_class) == iterate(TORCH)
    assert iterate(loader_class)[0] == "builtins.AssertionError"


def test_parameters_of_torch_come_first_in_the_same_order(
    loader_class: type,
) -> None:
    got = list(inspect.signature(loader_class.__init__).parameters.values())
    want = list(inspect.signature(TORCH.__init__).parameters.values())
    seen = [(part.name, part.kind, part.default) for part in got[: len(want)]]
    assert seen == [(part.name, part.kind, part.default) for part in want]
    assert all(part.kind is inspect.Parameter.KEYWORD_ONLY for part in got[len(want) :])


def test_every_public_attribute_is_a_constructor_argument(loader_class: type) -> None:
    """Ignite rebuilds loaders from every attribute without a leading underscore."""
    loader = loader_class(ROWS, batch_size=2, num_workers=1)
    public = {name for name in vars(loader) if not name.startswith("_")}
    assert public <= set(inspect.signature(loader_class.__init__).parameters)


def test_loader_rebuilt_from_its_attributes_yields_equal_batches(
    loader_class: type,
) -> None:
    loader = loader_class(ROWS, batch_size=2, num_workers=1, collate_fn=as_is)
    left_out = ("batch_size", "sampler", "drop_last", "batch_sampler")
    arguments = {
        name: value
        for name, value in vars(loader).items()
        if not name.startswith("_") and name not in left_out
    }
    arguments["batch_sampler"] = BatchSampler(SequentialSampler(ROWS), 2, False)
    assert list(loader_class(**arguments)) == list(loader) == [[1, 2], [3, 4], [5]]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"batch_size": 3, "shuffle": True, "num_workers": 2, "drop_last": True, "timeout": 5},
    {"batch_size": None},
    {"batch_sampler": [[1], [2]]},
    {"sampler": [3, 1], "generator": torch.Generator(), "pin_memory": True},
    {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 5, "in_order": False},
    {"dataset": STREAM, "batch_size": 3},
    {"dataset": STREAM, "batch_size": None, "pin_memory_device": "cuda"},
]


@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda options: re.sub(" object at 0x[0-9a-f]*", "", repr(options))
)
def test_attributes_match_the_torch_loader(loader_class: type, options: dict[str, Any]) -> None:
    arguments = {"dataset": ROWS, **options}
    got, want = vars(loader_class(**arguments)), vars(TORCH(**arguments))
    assert set(want) <= set(got)
    for name, value in want.items():
        if isinstance(value, Sampler):
            assert type(got[name]) is type(value), name
        else:
            assert got[name] == value or got[name] is value, name


def test_default_samplers_are_those_of_torch(loader_class: type) -> None:
    generator = torch.Generator()
    assert type(loader_class(ROWS).sampler) is SequentialSampler
    shuffled = loader_class(ROWS, shuffle=True, generator=generator).sampler
    assert type(shuffled) is RandomSampler
    assert shuffled.generator is generator
    assert type(loader_class(STREAM).sampler) is _InfiniteConstantSampler
    assert loader_class(ROWS, batch_size=None).batch_sampler is None


def test_dataset_kind_is_the_enumeration_of_torch(loader_class: type) -> None:
    assert loader_class(ROWS)._dataset_kind == _DatasetKind.Map
    assert loader_class(STREAM)._dataset_kind == _DatasetKind.Iterable


def test_constructor_reads_draws_and_starts_nothing(loader_class: type) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("read too early")

    class Untouchable(Computed):
        __iter__ = refuse

    state = torch.get_rng_state()
    loader = loader_class(
        Untouchable(4, refuse), shuffle=True, num_workers=2, persistent_workers=True
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert loader._iterator is None


FIXED = ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]


@pytest.mark.parametrize("name", FIXED)
def test_fixed_attribute_cannot_be_set_after_construction(loader_class: type, name: str) -> None:
    loader = loader_class(ROWS)
    with pytest.raises(ValueError) as info:
        setattr(loader, name, None)
    expected = f"{name} attribute should not be set after {loader_class.__name__} is initialized"
    assert str(info.value) == expected


def test_subclass_may_set_fixed_attributes_before_super_init(loader_class: type) -> None:
    class Early(loader_class):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.batch_size = 17
            super().__init__(ROWS, batch_size=2)

    loader = Early()
    assert loader.batch_size == 2
    with pytest.raises(ValueError, match="after Early is initialized"):
        loader.dataset = []


def test_attribute_guard_can_be_lifted_by_its_mangled_name(loader_class: type) -> None:
    """Timm's loaders replace the batch sampler in that way."""
    loader = loader_class(ROWS, batch_size=2, collate_fn=as_is)
    loader._DataLoader__initialized = False
    loader.batch_sampler = [[4], [0, 1]]
    loader._DataLoader__initialized = True
    assert list(loader) == [[5], [1, 2]]


def test_persistent_iterator_can_be_dropped_by_its_attribute(loader_class: type) -> None:
    """Lightning does so between fits."""
    loader = loader_class(ROWS, num_workers=1, persistent_workers=True)
    list(loader)
    first = loader._iterator._workers[0]
    loader._iterator._shutdown_workers()
    del loader._iterator
    loader._iterator = None
    assert not first.is_alive()
    assert [int(batch) for batch in loader] == ROWS


def test_subclass_may_override_iter_and_get_iterator(loader_class: type) -> None:
    class Twice(loader_class):  # type: ignore[misc, valid-type]
        def __iter__(self) -> Any:
            for _ in range(2):
                yield from super().__iter__()

    class Counted(loader_class):  # type: ignore[misc, valid-type]
        made = 0

        def _get_iterator(self) -> Any:
            type(self).made += 1
            return super()._get_iterator()

    assert len(list(Twice(ROWS, num_workers=1))) == 10
    assert len(list(Counted(ROWS, num_workers=1))) == 5
    assert Counted.made == 1


def test_class_can_be_subscripted(loader_class: type) -> None:
    assert loader_class[int].__origin__ is loader_class  # type: ignore[index]


def test_wrapper_with_copied_attributes_works(loader_class: type) -> None:
    """Fabric wraps a loader by copying its __dict__."""

    class Wrapper(loader_class):  # type: ignore[misc, valid-type]
        def __init__(self, inner: Any) -> None:
            self.__dict__.update(inner.__dict__)

    inner = loader_class(ROWS, num_workers=1)
    wrapper = Wrapper(inner)
    assert [int(batch) for batch in wrapper] == ROWS
    del wrapper
    assert [int(batch) for batch in inner] == ROWS


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_can_be_pickled_and_copied(loader_class: type, workers: int) -> None:
    loader = loader_class(Computed(4, number), batch_size=2, num_workers=workers)
    for twin in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader), copy.copy(loader)):
        assert type(twin) is loader_class
        assert [batch.tolist() for batch in twin] == [batch.tolist() for batch in loader]


@pytest.mark.parametrize(
    ("arguments", "length"),
    [
        ({"dataset": ROWS, "batch_size": 2}, 3),
        ({"dataset": ROWS, "batch_size": 2, "drop_last": True}, 2),
        ({"dataset": ROWS, "batch_size": None}, 5),
        ({"dataset": ROWS, "batch_sampler": [[1], [2, 3]]}, 2),
        ({"dataset": Streamed(list, 5), "batch_size": 2}, 3),
        ({"dataset": Streamed(list, 5), "batch_size": 2, "drop_last": True}, 2),
        ({"dataset": Streamed(list, 5), "batch_size": None}, 5),
    ],
)
def test_length_is_the_number_of_batches(
    loader_class: type, arguments: dict[str, Any], length: int
) -> None:
    assert len(loader_class(**arguments)) == length


def test_length_of_an_unsized_stream_raises_type_error(loader_class: type) -> None:
    with pytest.raises(TypeError, match="this dataset has no length"):
        len(loader_class(STREAM))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.skipif(torch.accelerator.is_available(), reason="asks what happens without one")
def test_pin_memory_without_an_accelerator_warns_at_iter(loader_class: type, workers: int) -> None:
    loader = loader_class(ROWS, pin_memory=True, num_workers=workers)
    with pytest.warns(UserWarning, match="'pin_memory' argument is set as true but no accelerator"):
        batches = list(loader)
    assert not any(batch.is_pinned() for batch in batches)


def test_too_many_workers_cause_warnings_at_construction_and_iter(
    loader_class: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    with pytest.warns(UserWarning, match="This DataLoader will create 2 worker processes in total"):
        loader = loader_class(ROWS, num_workers=2)
    with pytest.warns(UserWarning, match="This DataLoader will create 2 worker processes in total"):
        iter(loader)


def test_worker_info_is_absent_in_the_trainer(loader_class: type) -> None:
    list(loader_class(ROWS, num_workers=1))
    assert torch_worker._worker_info is None
