# SPDX-License-Identifier: Apache-2.0
"""``pool=Pool(...)`` and ``ranks=Ranks(...)``, and the flat arguments that they replace."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_datasets import CODE, Augmented, digests
from pool_processes import PoolProcesses
from shared_streams import Uneven
from stream_oracle import error_of
from torch.utils.data import BatchSampler, Dataset, SequentialSampler, TensorDataset

import penstock
from penstock import DataLoader, Pool, Ranks
from penstock.loader.options import LoaderOptions
from penstock.loader.variable_pool import VariablePool

ADDRESS = "tcp://127.0.0.1:9"  # without a listener
ROWS = TensorDataset(torch.arange(17))
RANKS = {"shard_by_rank": True, "rank": 1, "world_size": 2}
# Flat arguments, the grouped ones that the warning shows, and these as values.
FLAT: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "keys": (
        {"pool": ADDRESS, "keys": "certs"},
        f'pool=Pool("{ADDRESS}", keys="certs")',
        {"pool": Pool(ADDRESS, keys="certs")},
    ),
    "keys of the variable's pool": (
        {"keys": Path("certs")},
        'pool=Pool(None, keys="certs")',
        {"pool": Pool(None, keys=Path("certs"))},
    ),
    "keys by default": (
        {"pool": ADDRESS, "keys": None},
        f'pool="{ADDRESS}"',
        {"pool": ADDRESS},
    ),
    "code_paths": (
        {"pool": ADDRESS, "code_paths": (".", Path(__file__).parent.parent)},
        f'pool=Pool("{ADDRESS}", code_paths=[".", "{Path(__file__).parent.parent}"])',
        {"pool": Pool(ADDRESS, code_paths=(".", Path(__file__).parent.parent))},
    ),
    "no code_paths": (
        {"pool": ADDRESS, "code_paths": None},
        f'pool=Pool("{ADDRESS}", code_paths=None)',
        {"pool": Pool(ADDRESS, code_paths=None)},
    ),
    "trust_workers": (
        {"pool": ADDRESS, "trust_workers": True},
        f'pool=Pool("{ADDRESS}", trust_workers=True)',
        {"pool": Pool(ADDRESS, trust_workers=True)},
    ),
    "of no pool": (
        {"pool": "", "keys": "certs", "trust_workers": False},
        'pool=Pool("", keys="certs")',
        {"pool": Pool("", keys="certs")},
    ),
    "shard_by_rank": ({"shard_by_rank": True}, "ranks=Ranks()", {"ranks": Ranks()}),
    "shard_by_rank by default": ({"shard_by_rank": False}, "ranks=None", {}),
    "rank, world_size": (
        RANKS,
        "ranks=Ranks(rank=1, world_size=2)",
        {"ranks": Ranks(1, 2)},
    ),
    "global_batch_size": (
        {**RANKS, "global_batch_size": 6},
        "ranks=Ranks(rank=1, world_size=2, global_batch_size=6)",
        {"ranks": Ranks(1, 2, global_batch_size=6)},
    ),
    "remainder": (
        {**RANKS, "remainder": "drop"},
        'ranks=Ranks(rank=1, world_size=2, remainder="drop")',
        {"ranks": Ranks(1, 2, remainder="drop")},
    ),
    "replica_group": (
        {"replica_group": [0], "num_workers": 1},
        "ranks=Ranks(replica_group=[0])",
        {"ranks": Ranks(replica_group=[0]), "num_workers": 1},
    ),
    "replica_group with shard_by_rank": (
        {**RANKS, "replica_group": range(1), "num_workers": 1},
        "ranks=Ranks(rank=1, world_size=2, replica_group=[0])",
        {"ranks": Ranks(1, 2, replica_group=[0]), "num_workers": 1},
    ),
    "both groups": (
        {**RANKS, "pool": ADDRESS, "keys": "certs"},
        f'pool=Pool("{ADDRESS}", keys="certs"), ranks=Ranks(rank=1, world_size=2)',
        {"pool": Pool(ADDRESS, keys="certs"), "ranks": Ranks(1, 2)},
    ),
}
ARE_FLAT = (
    *("keys", "code_paths", "trust_workers", "shard_by_rank", "rank", "world_size"),
    *("global_batch_size", "remainder", "replica_group"),
)


@pytest.fixture(autouse=True)
def _no_pool_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_POOL", "PENSTOCK_KEYS", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def warned(make: Callable[[], Any]) -> tuple[Any, list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make()
    return made, caught


def silently(make: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return make()


def options_of(loader: Any) -> list[Any]:
    return [
        *LoaderOptions.of(loader).kept,
        *(getattr(loader, name) for name in ARE_FLAT),
        *(loader.pool, loader.ranks, loader.batch_size, repr(loader)),
    ]


# ---- The records


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Pool("localhost:7000"), ValueError, "address must be 'tcp://host:port', got 'l"),
        (lambda: Pool("tcp://host:70000"), ValueError, "pass the address of a controller, as in"),
        (lambda: Pool(7000), TypeError, "address must be a str or None, got 7000; pass"),
        (lambda: Pool(ADDRESS, keys=3), TypeError, "keys must be a path or None, got 3; pass"),
        (lambda: Pool(ADDRESS, code_paths="src"), TypeError, "code_paths must be a sequence of p"),
        (lambda: Pool(ADDRESS, code_paths=[3]), TypeError, r"got \[3\]; pass a list of folders"),
        (lambda: Pool(ADDRESS, trust_workers=1), TypeError, "trust_workers must be a bool, got 1"),
        (lambda: Pool(ADDRESS, keep="no"), TypeError, "keep must be a bool, got 'no'"),
        (lambda: Ranks(1), ValueError, "must be passed together, got rank=1 and world_size=None"),
        (lambda: Ranks(world_size=2), ValueError, "got rank=None and world_size=2; pass both"),
        (lambda: Ranks(2, 2), ValueError, "rank must be from 0 to world_size - 1, got rank=2 and"),
        (lambda: Ranks(-1, 2), ValueError, "got rank=-1 and world_size=2; pass the number of"),
        (lambda: Ranks("0", 2), TypeError, "rank must be an int or None, got '0'; pass a number"),
        (lambda: Ranks(global_batch_size=0), ValueError, "global_batch_size must be 1 or more, go"),
        (lambda: Ranks(0, 4, global_batch_size=3), ValueError, "must be 4 or more, got 3; pass"),
        (lambda: Ranks(global_batch_size=2.0), TypeError, "global_batch_size must be an int or"),
        (lambda: Ranks(remainder="keep"), ValueError, "one of 'pad', 'drop', 'uneven', got 'keep'"),
        (lambda: Ranks(replica_group=[]), ValueError, r"different ranks from 0 on, got \[\]; list"),
        (lambda: Ranks(replica_group=[-1]), ValueError, r"different ranks from 0 on, got \[-1\]"),
        (lambda: Ranks(replica_group=[1, 1]), ValueError, r"got \[1, 1\]; list each rank of the"),
        (lambda: Ranks(replica_group=4), TypeError, "replica_group must be a process group, a"),
        (
            lambda: Ranks(replica_group=[0], global_batch_size=4),
            ValueError,
            "rank and world_size are required with replica_group and global_batch_size, got",
        ),
        (lambda: DataLoader(ROWS, ranks=True), TypeError, "ranks must be a penstock.Ranks or None"),
        (lambda: DataLoader(ROWS, ranks=Ranks(replica_group=[1])), ValueError, "different ranks f"),
        (
            lambda: DataLoader(ROWS, pool=5),
            ValueError,
            "pool must be the address of a controller, .*, got 5",
        ),
    ],
)
def test_invalid_values_are_rejected(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        silently(make)


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        (Pool(None), "Pool(None)"),
        (Pool(ADDRESS), f"Pool('{ADDRESS}')"),
        (
            Pool(ADDRESS, keys=Path("certs"), code_paths=["src", Path("one.py")]),
            f"Pool('{ADDRESS}', keys='certs', code_paths=['src', 'one.py'])",
        ),
        (Pool("", code_paths=None, trust_workers=True), "Pool('', code_paths=None, "),
        (Ranks(), "Ranks()"),
        (Ranks(0, 2), "Ranks(rank=0, world_size=2)"),
        (Ranks(global_batch_size=8, remainder="uneven"), "Ranks(global_batch_size=8, remainder='"),
        (Ranks(replica_group=[3, 1]), "Ranks(replica_group=[1, 3])"),
    ],
    ids=str,
)
def test_records_are_values(record: Pool | Ranks, shown: str) -> None:
    assert repr(record).startswith(shown)
    for same in (copy.copy(record), copy.deepcopy(record), pickle.loads(pickle.dumps(record))):
        assert type(same) is type(record) and same == record and hash(same) == hash(record)
    assert dataclasses.replace(record) == record
    for name in (one.name for one in dataclasses.fields(record)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, name, None)
    assert not hasattr(record, "__dict__")


def test_signatures_name_types() -> None:
    for function in (DataLoader.__init__, Pool.__init__, Ranks.__init__):
        annotations = inspect.get_annotations(function)
        assert annotations and "Any" not in annotations.values()
        assert set(annotations) >= set(inspect.signature(function).parameters) - {"self"}
    parameters = inspect.signature(Pool).parameters.values()
    assert [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD] == ["address"]


# ---- The flat arguments


@pytest.mark.parametrize("name", FLAT)
def test_flat_argument_warns_with_the_new_line_and_means_the_same(name: str) -> None:
    flat, line, grouped = FLAT[name]
    loader, caught = warned(lambda: DataLoader(ROWS, shuffle=True, **flat))
    [warning] = caught
    given = [one for one in ARE_FLAT if one in flat]
    assert str(warning.message) == (
        f"DataLoader({', '.join(f'{one}=...' for one in given)}) is deprecated; write {line}"
    )
    assert warning.category is FutureWarning and warning.filename == __file__
    same = silently(lambda: DataLoader(ROWS, shuffle=True, **grouped))
    assert options_of(loader) == options_of(same)
    as_shown: dict[str, Any] = eval(f"dict({line})", {"Pool": Pool, "Ranks": Ranks})
    again = silently(lambda: DataLoader(ROWS, shuffle=True, **{**grouped, **as_shown}))
    assert LoaderOptions.of(again).kept[:-2] == LoaderOptions.of(same).kept[:-2]
    assert repr(again) == repr(same)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if "num_workers" in flat else [])
        for name, (flat, _, _) in FLAT.items()
        if "pool" not in flat
    ],
)
def test_flat_argument_gives_the_stream_of_the_grouped_one(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for the keys of local workers
    flat, _, grouped = FLAT[name]
    streams = []
    for arguments in (flat, grouped):
        torch.manual_seed(7)
        loader, _ = warned(lambda arguments=arguments: DataLoader(ROWS, shuffle=True, **arguments))
        streams.append([batch[0].tolist() for _ in range(2) for batch in loader])
    assert streams[0] == streams[1] and streams[0]


def test_shards_of_an_iterable_dataset_are_those_of_the_grouped_argument() -> None:
    dataset = Uneven([5, 3, 8, 2])
    options: dict[str, Any] = {"batch_size": 2, "shards": 4}
    grouped = DataLoader(dataset, ranks=Ranks(1, 2, remainder="uneven"), **options)
    with pytest.warns(FutureWarning, match=r"world_size=2, remainder=\"uneven\"\)$"):
        flat = DataLoader(dataset, **RANKS, remainder="uneven", **options)
    assert [one.tolist() for one in flat] == [one.tolist() for one in grouped]
    assert flat.state_dict() == grouped.state_dict()


def test_the_warning_is_about_the_line_of_a_subclass() -> None:
    class OfRanks(DataLoader[Any]):
        def __init__(self, dataset: Any, **options: Any) -> None:
            super().__init__(dataset, shard_by_rank=True, **options)  # this line

    loader, [warning] = warned(lambda: OfRanks(ROWS))
    assert loader.shard_by_rank
    line = Path(__file__).read_text().splitlines()[warning.lineno - 1]
    assert warning.filename == __file__ and "# this line" in line


@pytest.mark.parametrize(
    ("flat", "error", "text"),
    [
        ({"rank": 1, "world_size": 2}, ValueError, "rank requires shard_by_rank=True, got rank=1"),
        ({"remainder": "pad"}, ValueError, "pass shard_by_rank=True, or leave remainder out"),
        ({"shard_by_rank": True, "rank": 1}, ValueError, "got rank=1 and world_size=None; pass b"),
        ({**RANKS, "rank": 2}, ValueError, "0 <= rank < world_size, got rank=2 and w"),
        ({**RANKS, "remainder": "keep"}, ValueError, "remainder must be one of 'pad', .*'keep'"),
        (
            {**RANKS, "global_batch_size": 1},
            ValueError,
            "global_batch_size is 1 and there are 2 ranks, but must be an int of at least 2",
        ),
        (
            {**RANKS, "seeding": "batch"},
            ValueError,
            "seeding must be 'sample' with shard_by_rank=True, got 'batch', with which",
        ),
        (
            {**RANKS, "batch_size": None},
            ValueError,
            "shard_by_rank=True requires batches that the loader makes",
        ),
        (
            {"shard_by_rank": True, "replica_group": [0]},
            ValueError,
            r"rank and world_size are required with shard_by_rank and replica_group=\[0\]",
        ),
        ({"replica_group": "0"}, TypeError, "replica_group must be a process group"),
        (
            {"pool": ADDRESS, "trust_workers": "yes"},
            TypeError,
            "trust_workers must be a bool, got 'y",
        ),
        ({"pool": ADDRESS, "code_paths": "src"}, TypeError, "code_paths must be a sequence of pat"),
        (
            {"code_paths": ["/not/there"]},
            ValueError,
            "must name existing folders or files, got '/not",
        ),
        (
            {"pool": "head:7000", "keys": "k"},
            ValueError,
            "pool must be the address of .*'head:7000'",
        ),
    ],
)
def test_errors_of_flat_arguments_are_as_before(
    flat: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        silently(lambda: DataLoader(ROWS, **flat))


@pytest.mark.parametrize(
    ("mixed", "text"),
    [
        (
            {"pool": Pool(ADDRESS, keys="a"), "keys": "b"},
            r"keys must not be given with pool=Pool\(...\), got keys='b'; write pool=Pool\(..., ke",
        ),
        ({"pool": Pool(ADDRESS), "code_paths": ()}, "code_paths must not be given with pool=Pool"),
        ({"pool": Pool(None), "trust_workers": True}, "got trust_workers=True; write pool=Pool"),
        ({"ranks": Ranks(), "rank": 1}, r"got rank=1; write ranks=Ranks\(..., rank=...\)"),
        ({"ranks": Ranks(), "shard_by_rank": True}, "True; leave shard_by_rank out"),
        ({"ranks": Ranks(), "replica_group": None}, "replica_group must not be given with ranks"),
        ({"ranks": Ranks(), "global_batch_size": 4}, "global_batch_size must not be given with"),
    ],
)
def test_a_record_and_a_flat_argument_of_its_group_are_rejected(
    mixed: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        silently(lambda: DataLoader(ROWS, **mixed))


# ---- Loaders


def test_the_address_alone_is_the_short_form() -> None:
    short = silently(lambda: DataLoader(ROWS, pool=ADDRESS))
    assert options_of(short) == options_of(silently(lambda: DataLoader(ROWS, pool=Pool(ADDRESS))))
    assert short.pool == ADDRESS and type(short.pool) is str


def test_the_variables_pool_has_the_other_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_POOL", ADDRESS)
    monkeypatch.setenv("PENSTOCK_KEYS", "of the environment")
    given = Pool(None, code_paths=None, trust_workers=True)
    loader = silently(lambda: DataLoader(ROWS, num_workers=1, pool=given))
    assert type(loader.pool) is VariablePool and loader.pool == ADDRESS
    assert (loader.code_paths, loader.trust_workers) == (None, True)
    assert loader.keys == "of the environment"
    for none in ("", Pool("", keys="certs")):
        loader = silently(lambda none=none: DataLoader(ROWS, num_workers=1, pool=none))
        assert loader.pool is None
    assert loader.keys == "certs"


def test_ranks_in_use_are_an_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DataLoader(ROWS).ranks is None
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    loader = DataLoader(ROWS, 2, drop_last=True, ranks=Ranks())
    assert loader.ranks == Ranks(2, 4, remainder="drop")
    assert (loader.rank, loader.world_size, loader.remainder) == (2, 4, "drop")
    group = DataLoader(ROWS, num_workers=1, ranks=Ranks(replica_group=[3, 2]))
    assert group.replica_group == (2, 3) and group.ranks == Ranks(replica_group=[2, 3])
    assert (group.shard_by_rank, group.rank, group.world_size) == (False, None, None)


def test_attributes_are_read_and_assigned_without_a_warning() -> None:
    def use() -> None:
        loader: Any = DataLoader(ROWS, pool=Pool(ADDRESS, keys="a"), ranks=Ranks(0, 1))
        before = LoaderOptions.of(loader).kept
        loader.keys, loader.code_paths, loader.trust_workers = "b", ["."], True
        loader.rank, loader.world_size = 3, 8  # one after the other
        loader.global_batch_size, loader.remainder = 16, "uneven"
        assert LoaderOptions.of(loader).kept != before
        assert loader.ranks == Ranks(3, 8, global_batch_size=16, remainder="uneven")
        assert (loader.pool, loader.keys, loader.code_paths) == (ADDRESS, "b", ["."])
        loader.pool = "tcp://head:7000"
        assert (loader.pool, loader.keys, loader.trust_workers) == ("tcp://head:7000", "b", True)
        loader.pool = Pool(ADDRESS, keys="c")
        assert (loader.pool, loader.keys, loader.trust_workers) == (ADDRESS, "c", False)
        loader.pool = None
        assert loader.pool is None and loader.keys == "c"
        loader.shard_by_rank = True
        loader.shard_by_rank = False
        assert loader.ranks is None and loader.rank is None

    silently(use)


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        ("rank", 5, ValueError, "rank must be from 0 to world_size - 1, got rank=5"),
        ("remainder", "keep", ValueError, "got 'keep'"),
        ("ranks", True, TypeError, "ranks must be a penstock.Ranks or None, got True"),
        ("trust_workers", "yes", TypeError, "trust_workers must be a bool, got 'yes'"),
        ("code_paths", ["/not/there"], ValueError, "must name existing folders or files"),
        ("pool", "head:7000", ValueError, "got 'head:7000'"),
    ],
)
def test_assigned_values_are_checked_by_iter(
    name: str, value: Any, error: type[Exception], text: str
) -> None:
    loader = DataLoader(ROWS, ranks=Ranks(0, 1))
    setattr(loader, name, value)
    found = error_of(lambda: iter(loader))
    assert type(found) is error and text in str(found)


def test_a_loader_cannot_be_given_ranks_later() -> None:
    loader: Any = DataLoader(ROWS)
    loader.shard_by_rank = False
    with pytest.raises(ValueError, match="got True for a loader without ranks; make a new loader"):
        loader.shard_by_rank = True


def test_programs_with_attributes_of_these_names_work_as_before() -> None:
    """A subclass may count ranks itself, as programs that were written for torch do."""

    class Counted(DataLoader[Any]):
        def __init__(self, dataset: Dataset[Any], rank: int, world_size: int) -> None:
            self.rank = rank
            super().__init__(dataset, batch_size=4, sampler=range(rank, 17, world_size))
            self.rank, self.world_size, self.keys = rank, world_size, "names of columns"

    loader = silently(lambda: Counted(ROWS, 1, 2))
    assert (loader.rank, loader.world_size, loader.keys) == (1, 2, "names of columns")
    assert not loader.shard_by_rank and loader.ranks is None
    assert [batch[0].tolist() for batch in loader] == [[1, 3, 5, 7], [9, 11, 13, 15]]
    again = pickle.loads(pickle.dumps(DataLoader(ROWS)))
    again.rank = 3
    assert copy.copy(again).rank == 3


@pytest.mark.parametrize("name", FLAT)
def test_copies_have_the_same_options_and_do_not_warn(name: str) -> None:
    loader, _ = warned(lambda: DataLoader(ROWS, **FLAT[name][0]))
    for make in (copy.copy, lambda one: pickle.loads(pickle.dumps(one))):
        same = silently(lambda make=make: make(loader))
        assert options_of(same) == options_of(loader)
        assert same._sharding_words == loader._sharding_words


def rebuilt(loader: Any) -> Any:
    """As Lightning and ignite do: from the attributes that are parameters."""
    parameters = inspect.signature(type(loader).__init__).parameters
    public = {name: value for name, value in vars(loader).items() if not name.startswith("_")}
    assert set(public) <= set(parameters)
    changed = {
        name: value for name, value in public.items() if value is not parameters[name].default
    }
    for name in ("batch_size", "sampler", "drop_last", "batch_sampler"):
        changed.pop(name, None)
    if loader.batch_sampler is not None and loader.ranks is None:
        changed["batch_sampler"] = BatchSampler(SequentialSampler(ROWS), 2, False)
    return type(loader)(**changed)


@pytest.mark.parametrize(
    "name", [name for name, (flat, _, _) in FLAT.items() if "global_batch_size" not in flat]
)
def test_rebuilt_loaders_have_the_same_options_and_do_not_warn(name: str) -> None:
    flat, _, grouped = FLAT[name]
    for arguments in (flat, grouped):
        loader, _ = warned(lambda arguments=arguments: DataLoader(ROWS, **arguments))
        again = silently(lambda loader=loader: rebuilt(loader))
        assert [getattr(again, one) for one in ARE_FLAT] == [
            getattr(loader, one) for one in ARE_FLAT
        ]
        assert (again.pool, again.ranks) == (loader.pool, loader.ranks)


def test_rebuilt_loaders_have_what_was_assigned() -> None:
    loader: Any = DataLoader(ROWS, num_workers=1)
    loader.keys, loader.trust_workers = "certs", True
    again = silently(lambda: rebuilt(loader))
    assert (again.pool, again.keys, again.trust_workers) == (None, "certs", True)


def test_rebuilt_loader_still_has_the_variables_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_POOL", ADDRESS)
    loader = DataLoader(ROWS, num_workers=1, pool=Pool(None, keys="certs"))
    monkeypatch.delenv("PENSTOCK_POOL")
    again = silently(lambda: rebuilt(loader))
    assert type(again.pool) is VariablePool and (again.pool, again.keys) == (ADDRESS, "certs")


def test_the_stand_in_of_install_takes_both_forms() -> None:
    penstock.install()
    try:
        loader = silently(lambda: torch.utils.data.DataLoader(ROWS, ranks=Ranks(1, 2)))
        flat, [warning] = warned(lambda: torch.utils.data.DataLoader(ROWS, **RANKS))
        assert warning.filename == __file__ and warning.category is FutureWarning
        assert options_of(flat) == options_of(loader)
    finally:
        penstock.uninstall()


def test_state_of_torchs_loader_has_neither_group() -> None:
    torchs = torch.utils.data.DataLoader(ROWS, batch_size=4)
    loader = DataLoader.__new__(DataLoader)
    loader.__setstate__(dict(vars(torchs)))
    assert (loader.pool, loader.ranks, loader.keys, loader.rank) == (None, None, None, None)
    assert [len(batch[0]) for batch in loader] == [4, 4, 4, 4, 1]


@pytest.mark.slow
def test_a_pool_serves_both_forms_alike(steady_pool: PoolProcesses) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "timeout": 60}
    grouped = Pool(steady_pool.endpoint, code_paths=[CODE], trust_workers=True)
    torch.manual_seed(7)
    found = digests(silently(lambda: DataLoader(Augmented(24), pool=grouped, **options)))
    torch.manual_seed(7)
    flat, [warning] = warned(
        lambda: DataLoader(
            Augmented(24),
            pool=steady_pool.endpoint,
            code_paths=[CODE],
            trust_workers=True,
            **options,
        )
    )
    assert str(warning.message).endswith(
        f'write pool=Pool("{steady_pool.endpoint}", code_paths=["{CODE}"], trust_workers=True)'
    )
    assert digests(flat) == found and len(found) == 6
    assert flat.stats().iterator == "pool"
