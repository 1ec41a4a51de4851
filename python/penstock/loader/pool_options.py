# SPDX-License-Identifier: Apache-2.0
"""The options of ``pool=``: their values, and the loaders that a pool cannot serve."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import IterDataPipe, MapDataPipe

from penstock.loader.loader_face import LoaderFace
from penstock.seams.iterators import DatasetKind
from penstock.stream.shard_state import is_stateful
from penstock.tuning.worker_tuner import AutomaticCount

KEYS_VARIABLE = "PENSTOCK_KEYS"
# The arguments of torch's constructor in the place of options that are the pool's.
DEFAULT_PREFETCH_FACTOR = 2
_ADDRESS = re.compile(r"tcp://(?:\[[^\s\[\]]+\]|[^\s\[\]:/]+):([0-9]{1,5})")


class Obstacle(NamedTuple):
    """Why a pool cannot serve a loader."""

    seen: str
    remedy: str


def chosen_keys(keys: str | os.PathLike[str] | None) -> str | None:
    """The folder of keys that ``keys`` and the environment name."""
    chosen = os.environ.get(KEYS_VARIABLE) if keys is None else os.fspath(keys)
    return chosen or None


def check_pool_options(loader: LoaderFace) -> None:
    """Refuses values that a pool's options cannot have. Raises ValueError or TypeError."""
    _check_code_paths(loader.code_paths)
    if type(loader.trust_workers) is not bool:
        raise TypeError(
            f"trust_workers is {loader.trust_workers!r}; True or False is expected: whether "
            f"pickled objects that a pool's workers send may be unpickled here, which runs code of "
            f"theirs"
        )
    if loader.pool is None and loader.replica_group is None:
        return
    if loader.pool is not None and not is_address(loader.pool):
        raise ValueError(
            f"pool is {loader.pool!r}; the address of a controller is expected, as in "
            f"'tcp://host:7000'"
        )
    obstacle = obstacle_to_pool(loader)
    if obstacle is not None:
        name = "pool" if loader.replica_group is None else "replica_group"
        raise ValueError(
            f"{name}={getattr(loader, name)!r} was given and {obstacle.seen}; {obstacle.remedy}, "
            f"or leave {name} out"
        )
    if loader.pool is None and loader.num_workers == 0:
        raise ValueError(
            f"replica_group={loader.replica_group} was given and num_workers is 0, so that nobody "
            f"makes the batches that these ranks share; give pool=, or num_workers=1 or more"
        )


def is_address(pool: Any) -> bool:
    """Whether ``pool`` could be the address of a controller, which has a host and a port."""
    found = _ADDRESS.fullmatch(pool) if isinstance(pool, str) else None
    return found is not None and 0 < int(found[1]) < 1 << 16


def obstacle_to_pool(loader: LoaderFace) -> Obstacle | None:
    """An option of the loader that no pool can serve, if there is one."""
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return Obstacle(
            "the dataset is a datapipe, which only torch's own iterator reads",
            "use a map-style or an iterable dataset",
        )
    if isinstance(loader.num_workers, AutomaticCount):
        return Obstacle(
            "num_workers is 'auto', which chooses a number of processes on this machine, while "
            "with a pool, it is the pool that grows and shrinks",
            "pass how many processes of the trainer's own are to serve beside the pool",
        )
    if loader.seeding == "worker":
        return Obstacle(
            "seeding is 'worker', with which the stream depends on which workers there are, and "
            "those of a pool come and go",
            "seeding='batch' is expected, which is the default with a pool",
        )
    if loader._dataset_kind == DatasetKind.Map and is_stateful(loader.dataset):
        return Obstacle(
            f"{type(loader.dataset).__name__} has a state_dict() and is read by index, so that "
            f"each worker has a state of its own and the stream depends on which there are",
            "leave the state out of the dataset",
        )
    return None


def _check_code_paths(code_paths: Any) -> None:
    if code_paths is None:
        return
    if isinstance(code_paths, (str, bytes)) or not isinstance(code_paths, Sequence):
        raise TypeError(
            f"code_paths is {code_paths!r}; a list of folders or files is expected, whose modules "
            f"travel to the pool's workers beside the program's own, or None, for no modules at all"
        )
    for path in code_paths:
        if not Path(path).exists():
            raise ValueError(
                f"code_paths names {os.fspath(path)!r}, which is not there; name folders that hold "
                f"the modules of your own that the dataset needs, or single files"
            )
