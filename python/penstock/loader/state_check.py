# SPDX-License-Identifier: Apache-2.0
"""The form of a loader's state, checked before any part of it is used.

A state is data: it may be from an untrusted file. If its form differs from ``state_dict()``'s, a
ValueError that names the place is raised, and no part of it is unpickled or looked up. The states
of the program's datasets and samplers are passed on to these unchanged.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import torch

from penstock.loader.options import LoaderOptions
from penstock.loader.rank_states import opened
from penstock.ranks.sharding import RankBatchSampler
from penstock.stream.indices import recognise_sampler
from penstock.stream.places import places_from_json
from penstock.stream.progress import SAMPLERS, own_generators
from penstock.stream.shard_state import is_stateful

_COUNT_MAX = 1 << 53  # epochs and batches below it can be counted further
_SEED_MAX = 1 << 63
_EPOCH_MAX = 0xFFFF_FFFF  # of a record of visits
_MT19937_WORDS = 624
_PHILOX_WORDS = 4
# The parts of a skipped sample, in addition to its index.
_SKIPPED_TEXTS = ("error", "message", "place")
_SKIPPED_COUNTS = ("epoch", "batch", "times")


class Part:
    """Part of a state. Its methods raise ValueError if its form is wrong."""

    def __init__(self, value: Any, place: str = "state") -> None:
        self.value = value
        self.place = place

    def __getitem__(self, name: str | int) -> Part:
        """Return a part of it; its value is None if there is none of that name."""
        value = self.value.get(name) if isinstance(name, str) else self.value[name]
        return Part(value, f"{self.place}[{name!r}]")

    def expect(self, wanted: str) -> NoReturn:
        raise ValueError(
            f"{self.place} must be {wanted}, got {_format(self.value)}; load the state as "
            f"state_dict() returned it"
        )

    def integer(self, least: int = 0, most: int = _COUNT_MAX) -> int:
        if type(self.value) is not int or not least <= self.value <= most:
            self.expect(f"an integer from {least} to {most}")
        return int(self.value)

    def boolean(self) -> bool:
        if type(self.value) is not bool:
            self.expect("True or False")
        return bool(self.value)

    def dictionary(self, *names: str, may_lack: tuple[str, ...] = ()) -> None:
        """Check that it has these parts, and possibly others of ``may_lack``."""
        if not isinstance(self.value, Mapping):
            self.expect("a dictionary")
        missing = [name for name in names if name not in self.value]
        if missing:
            self.expect(f"a dictionary with {', '.join(map(repr, missing))}")
        unknown = [name for name in self.value if name not in names and name not in may_lack]
        if unknown and may_lack:
            self.expect(f"a dictionary with only the keys {', '.join([*names, *may_lack])}")

    def sequence(self, count: int | None = None) -> list[Part]:
        """Return the parts of a list, or of the tuple that torch.distributed.checkpoint keeps."""
        if not isinstance(self.value, (list, tuple)):
            self.expect("a list")
        if count is not None and len(self.value) != count:
            self.expect(f"a list of {count}")
        return [self[place] for place in range(len(self.value))]


def check_form(options: LoaderOptions, state: Mapping[str, Any]) -> None:
    """Raise ValueError, which names the place, if ``state`` does not have the form of this loader's
    states."""
    if options.is_same_on_all_ranks:
        state = opened(dict(state))
    whole = Part(state)
    whole.dictionary("base_seed", "dataset", "generators", "shards", "_index_sampler_state")
    whole["epoch"].integer()
    whole["_num_yielded"].integer()
    whole["_iterator_finished"].boolean()
    whole["draws_seed"].boolean()
    answered_count = whole["_sampler_iter_yielded"].integer()
    if whole["base_seed"].value is not None:
        whole["base_seed"].integer(-_SEED_MAX, _SEED_MAX - 1)
    if whole["samples"].value is not None:
        whole["samples"].integer()
    if whole["data"].value is not None and type(whole["data"].value) is not str:
        whole["data"].expect("a string or None")
    if whole["visits"].value is not None:
        whole["visits"].dictionary("epoch")
        whole["visits"]["epoch"].integer(0, _EPOCH_MAX)
    _check_generators(options, whole["generators"])
    _check_shards(options, whole["shards"])
    first = _check_left(whole["left"], answered_count)
    if isinstance(options.index_sampler, RankBatchSampler):
        _check_runs(whole, len(options.index_sampler.sampler))
    _check_sampler(options, whole, first)
    _check_of_dataset(options, whole)
    _check_skipped(whole["skipped"])
    _check_commits(options, whole["commits"])
    is_between = whole["base_seed"].value is None or whole["_iterator_finished"].value
    if is_between:
        return
    if whole["shards"].value is None:
        whole["shards"].expect("a dictionary")
    if isinstance(options.index_sampler, RankBatchSampler):
        whole["samples"].integer()
    if options.is_map:
        recipe = recognise_sampler(options.index_sampler)
        if recipe is not None and recipe.share is None:
            whole["_sampler_iter_yielded"].integer(0, recipe.batch_count)


def check_built(of_state: Any) -> None:
    """Raise ValueError if the construction inputs of the state's loader are not a dictionary of
    plain values."""
    built = Part(of_state, "state['built']")
    built.dictionary()
    for name in built.value:
        part = built[name]
        if part.value is not None and type(part.value) not in (bool, int, float, str):
            part.expect("a number, a string or None")


def _check_left(left: Part, answered_count: int) -> int:
    """Check the batches left, and return the place of the first one."""
    if left.value is None:
        return answered_count
    left.dictionary("through", "missing")
    through = left["through"].integer()
    first = 0
    places = _places_of(left["missing"], through)
    for part in places:
        first = part.integer(first, through - 1) + 1
    return places[0].integer() if places else through


def _check_runs(whole: Part, sample_count: int) -> None:
    """Check which samples of an order of ranks the steps have that are left."""
    left = whole["left"]
    if left.value is None:
        return
    given_count = whole["samples"].integer(0, sample_count)
    runs = left["runs"].sequence()
    next_step = 0
    for run in runs:
        first_step, first_sample, size = run.sequence(3)
        next_step = first_step.integer(next_step) + 1
        first_sample.integer(0, sample_count)
        size.integer(1, sample_count)
    at, next_sample = -1, 0
    for step in places_from_json(left["missing"].value):
        while at + 1 < len(runs) and runs[at + 1].value[0] <= step:
            at += 1
        if at < 0:
            left["runs"].expect(f"a list with the run of step {step}")
        first_step, first_sample, size = runs[at].value
        first = first_sample + (step - first_step) * size
        if not next_sample <= first < given_count:
            runs[at].expect(f"a run whose step {step} has samples from {next_sample} on")
        next_sample = min(first + size, sample_count)
    if next_sample > given_count:
        whole["samples"].expect(f"an integer of at least {next_sample}")


def _places_of(missing: Part, through: int) -> list[Part]:
    """Return the places, of which bits have none beyond ``through``."""
    if not isinstance(missing.value, Mapping):
        return missing.sequence()
    missing.dictionary("first", "bits")
    first = missing["first"].integer(0, through)
    bits = missing["bits"]
    if type(bits.value) is not str or len(bits.value) > through - first + 4:
        bits.expect(f"base64 of at most {through - first} bits")
    try:
        places = places_from_json(missing.value)
    except ValueError as error:
        bits.expect(f"base64 ({error})")
    if not places or places[0] != first:
        bits.expect("base64 of bits of which the first is set")
    return [Part(place, f"{bits.place} of place {place}") for place in places]


def _check_shards(options: LoaderOptions, shards: Part) -> None:
    if shards.value is None:
        return
    shards.dictionary("counts", "last", "states")
    process_count = options.shard_count
    is_iterable = options.is_iterable
    counts = shards["counts"].sequence()
    for part in counts:
        part.integer()
    if shards["last"].value is not None:
        most = process_count if is_iterable else max(process_count, len(counts))
        shards["last"].integer(0, most - 1)
    if shards["step"].value is not None:
        shards["step"].integer()
    for name in ("states", "before"):
        if shards[name].value is None:
            continue
        states = shards[name].sequence()
        if name == "states" and len(counts) != len(states) and len(states) == process_count:
            shards["counts"].expect(f"a list of {len(states)}")
        for place, part in enumerate(states):
            count = counts[place].value if name == "states" and place < len(counts) else 0
            _check_shard(options, part, count)


def _check_shard(options: LoaderOptions, shard: Part, batch_count: int) -> None:
    if shard.value is None:
        return
    if not isinstance(shard.value, Mapping):
        shard.expect("a dictionary or None")
    shard.dictionary(may_lack=("dataset", "iterator", "ended", "batches"))
    if "ended" in shard.value:
        shard["ended"].boolean()
    if "batches" in shard.value:
        shard["batches"].integer(0, batch_count)
    if "dataset" in shard.value and not is_stateful(options.dataset):
        shard["dataset"].expect(f"left out, since {_type_of(options.dataset)} takes no state")
    if "iterator" in shard.value and not options.is_iterable:
        shard["iterator"].expect(f"left out, since {_type_of(options.dataset)} is not iterated")


def _check_sampler(options: LoaderOptions, whole: Part, first: int) -> None:
    samplers = whole["samplers"]
    if samplers.value is not None:
        samplers.dictionary()
        for name in samplers.value:
            if name not in SAMPLERS:
                samplers.expect(f"a dictionary with only the keys {', '.join(SAMPLERS)}")
            _check_takes(samplers[name], getattr(options, name))
    state = whole["_index_sampler_state"]
    of_place = whole["sampler"]
    if state.value is None:
        if of_place.value is not None:
            of_place.expect("None without a state of the sampler")
        return
    state.dictionary("samples_yielded", may_lack=("index_sampler", "sampler", "iterator"))
    state["samples_yielded"].integer()
    index_sampler = options.index_sampler
    parts = {"index_sampler": index_sampler, "sampler": getattr(index_sampler, "sampler", None)}
    for name, part in parts.items():
        if name in state.value:
            _check_takes(state[name], part)
    if of_place.value is None:
        return
    of_place.dictionary("pulls", "asked", "is_over", may_lack=("samples",))
    pull_count = of_place["pulls"].integer()
    of_place["is_over"].boolean()
    of_place["asked"].sequence(max(0, pull_count - first))
    if of_place["samples"].value is not None:
        of_place["samples"].integer(0, whole["samples"].integer())
    if isinstance(index_sampler, RankBatchSampler):
        of_place["pulls"].integer(0, first)


def _check_commits(options: LoaderOptions, commits: Part) -> None:
    if commits.value is None:
        return
    commits.dictionary("epoch", "earlier")
    epoch_count = commits["epoch"].integer()
    next_epoch = 0
    for epoch in commits["earlier"].sequence():
        epoch.dictionary("epoch", "seed_epoch", "base_seed", "batches")
        next_epoch = epoch["epoch"].integer(next_epoch, epoch_count - 1) + 1
        epoch["seed_epoch"].integer()
        epoch["base_seed"].integer(-_SEED_MAX, _SEED_MAX - 1)
        next_place = 0
        batches = epoch["batches"].sequence()
        if not batches:
            epoch["batches"].expect("a list of at least one batch")
        for batch in batches:
            place, first_place, index = batch.sequence(3)
            next_place = place.integer(next_place) + 1
            first_place.integer()
            if isinstance(options.index_sampler, RankBatchSampler) and not index.sequence():
                index.expect("a list of at least one index")
    if commits["earlier"].value and options.commit is None:
        raise ValueError(
            f"the state has batches of {len(commits['earlier'].value)} earlier epochs that were "
            f"delivered and not committed, which a loader without commit cannot repeat; pass "
            f'commit="manual" or "auto" to DataLoader'
        )


def _check_skipped(skipped: Part) -> None:
    if skipped.value is None:
        return
    skipped.dictionary("epoch", "samples")
    skipped["epoch"].integer()
    for sample in skipped["samples"].sequence():
        sample.dictionary("index", *_SKIPPED_TEXTS, *_SKIPPED_COUNTS)
        if len(sample.value) > 1 + len(_SKIPPED_TEXTS) + len(_SKIPPED_COUNTS):
            sample.expect("a dictionary without other keys")
        if type(sample["index"].value) not in (int, str):
            sample["index"].expect("an integer or a string")
        for name in _SKIPPED_TEXTS:
            if type(sample[name].value) is not str:
                sample[name].expect("a string")
        for name in _SKIPPED_COUNTS:
            sample[name].integer()


def _check_of_dataset(options: LoaderOptions, whole: Part) -> None:
    if whole["dataset"].value is not None:
        _check_takes(whole["dataset"], options.dataset)
    if whole["iterator"].value is not None and not options.is_iterable:
        whole["iterator"].expect(f"left out, since {_type_of(options.dataset)} is not iterated")


def _check_takes(part: Part, thing: Any) -> None:
    if not is_stateful(thing):
        part.expect(f"left out, since {_type_of(thing)} takes no state")


def _check_generators(options: LoaderOptions, generators: Part) -> None:
    generators.dictionary("globals", "own")
    of_globals = generators["globals"]
    of_globals.dictionary("torch", "random", "numpy")
    if of_globals["torch"].value is not None:
        _check_of_torch(of_globals["torch"], torch.Generator())
    if of_globals["random"].value is not None:
        _check_of_random(of_globals["random"])
    if of_globals["numpy"].value is not None:
        _check_of_numpy(of_globals["numpy"])
    generators["own"].dictionary()
    mine = own_generators(options)
    known = {id(mine[name]) for name in generators["own"].value if name in mine}
    for name, generator in mine.items():
        if known and id(generator) not in known:  # one that several share is in a state once
            generators["own"].expect(
                f"a dictionary with {name!r}, whose generator is another than the ones of "
                f"{', '.join(map(repr, generators['own'].value))}"
            )
    for name in generators["own"].value:
        part = generators["own"][name]
        scratch = torch.Generator(device=mine[name].device) if name in mine else None
        _check_of_torch(part, scratch)


def _check_of_torch(part: Part, scratch: torch.Generator | None) -> None:
    """Try the state on an unused generator; with None, check its form alone."""
    if type(part.value) is not str:
        part.expect("a base64 string")
    try:
        content = bytearray(base64.b64decode(part.value, validate=True))
        if scratch is not None:
            scratch.set_state(torch.frombuffer(content, dtype=torch.uint8))
    except Exception as error:
        part.expect(f"the state of a torch generator ({type(error).__name__}: {error})")


def _check_of_random(part: Part) -> None:
    version, words, gauss_next = part.sequence(3)
    version.integer()
    for word in words.sequence():
        word.integer(0, (1 << 32) - 1)
    try:
        random.Random().setstate((version.value, tuple(words.value), gauss_next.value))
    except Exception as error:
        part.expect(f"a result of random.getstate() ({type(error).__name__}: {error})")
    if gauss_next.value is not None and type(gauss_next.value) is not float:
        gauss_next.expect("a float or None")


def _check_of_numpy(part: Part) -> None:
    """Check the form in full: NumPy accepts any place in its words, and would read beyond them."""
    part.dictionary("bit_generator", "state", "has_gauss", "gauss")
    of_bits = part["state"]
    of_bits.dictionary()
    if part["bit_generator"].value == "MT19937":
        of_bits.dictionary("key", "pos")
        of_bits["pos"].integer(0, _MT19937_WORDS)
        for word in of_bits["key"].sequence(_MT19937_WORDS):
            word.integer(0, (1 << 32) - 1)
    if part["bit_generator"].value == "Philox":
        part["buffer_pos"].integer(0, _PHILOX_WORDS)
    part["has_gauss"].integer(0, 1)
    if type(part["gauss"].value) not in (int, float):
        part["gauss"].expect("a number")
    try:
        now: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        np.random.RandomState(type(now)()).set_state(part.value)
    except Exception as error:
        part.expect(f"a state of this numpy's generator ({type(error).__name__}: {error})")


def _format(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)[:80]
    if isinstance(value, (list, tuple, Mapping, str, bytes)):
        return f"{_type_of(value)} of {len(value)}"
    return _type_of(value)


def _type_of(value: Any) -> str:
    return type(value).__qualname__
