# SPDX-License-Identifier: Apache-2.0
"""The loader for torchtitan in examples/ranks: a mixture from a pool, finite data on several ranks,
and states that continue on any number of ranks.

The tests run with torchtitan where it is importable, and with a stand-in for the few of its classes
that the example uses: torchtitan's requirements conflict with those of the other tests.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gloo_ranks import GlooRanks
from pool_processes import PoolProcesses, pool_of

from penstock import MixtureSampler, Packer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "ranks"
CONTEXT, DOCUMENTS = 8, (40, 24)
FIRST_TOKEN = 5000  # of a document, plus its source

STAND_IN = """
    import glob, json
    from dataclasses import dataclass, make_dataclass
    import torch

    class Configurable:
        @dataclass(kw_only=True, slots=True)
        class Config:
            pass

        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            cls.Config.build = lambda config, **given: cls(config, **given)

    class Record:
        def __init__(self, **values):
            vars(self).update(values)

    class DatasetBuildContext(Record):
        pass

    class DatasetIterationPolicy(Record):
        pass

    class TextSequence(Record):
        pass

    class SampleProcessor(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            pass

    class IndexedJsonlSource(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            patterns: tuple

        def __init__(self, config, *, dataset_iteration_policy):
            with open(config.patterns[0]) as file:
                self.rows = [json.loads(line) for line in file]

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, index):
            return self.rows[index]

    class HuggingFaceRandomAccessSource(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            path: str
            split: str

    class HuggingFaceStreamingSource(HuggingFaceRandomAccessSource):
        @dataclass(kw_only=True, slots=True)
        class Config(HuggingFaceRandomAccessSource.Config):
            pass

    @dataclass(kw_only=True)
    class SingleDatasetConfig:
        source: object
        pre_filters: tuple = ()
        processor: object = None
        post_filters: tuple = ()

    @dataclass(kw_only=True)
    class WeightedDataset:
        dataset: object
        weight: float = 1.0

    @dataclass(kw_only=True)
    class DatasetMixConfig:
        datasets: tuple

    @dataclass(kw_only=True)
    class DatasetConcatConfig:
        datasets: tuple

    @dataclass(kw_only=True)
    class ConcatThenSplitPackingConfig:
        dataset: object

    @dataclass(kw_only=True)
    class FirstFitPackingConfig:
        dataset: object
        num_packing_bins: int = 8

    class TextCollator(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            pass

        def __init__(self, config, *, context):
            self.length = context.num_tokens_per_batch

        def __call__(self, rows):
            tokens = torch.cat([torch.as_tensor(row.input_ids) for row in rows])
            labels = torch.cat([torch.as_tensor(row.labels) for row in rows])
            places = [getattr(row, "positions", None) for row in rows]
            places = [
                torch.arange(len(row.input_ids)) if place is None else torch.as_tensor(place)
                for row, place in zip(rows, places)
            ]
            left = self.length - len(tokens)
            pad = torch.nn.functional.pad
            inputs = {
                "input": pad(tokens, (0, left)),
                "positions": torch.cat([*places, torch.arange(left)]),
            }
            return inputs, pad(labels, (0, left), value=-100)
"""
LOADER = """
    from dataclasses import dataclass
    from torchtitan.components.data import Configurable

    class BaseDataLoader(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            pass
"""
PROCESSOR = """
    import os
    from dataclasses import dataclass
    import numpy as np
    from torchtitan.components.data import SampleProcessor, TextSequence

    class Tokens(SampleProcessor):
        @dataclass(kw_only=True, slots=True)
        class Config(SampleProcessor.Config):
            pass

        def __init__(self, config, *, context):
            pass

        def __call__(self, sample, rng):
            if "TITAN_MADE" in os.environ:
                with open(os.environ["TITAN_MADE"], "a") as file:
                    file.write(f"{sample['source']} {sample['number']}\\n")
            if sample["number"] % 8 == 7:
                return None
            end = 3 + sample["number"] % 9  # some are longer than the context
            values = [5000 + sample["source"], sample["number"], *rng.integers(0, 1000, end)]
            tokens = np.array(values, dtype=np.int64)
            return TextSequence(input_ids=tokens[:-1], labels=tokens[1:])
"""


@pytest.fixture(params=["stand_in", "torchtitan"])
def example(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    """The example's module, and a processor beside it."""
    names = {"titan_loader", "titan_tokens"}
    if request.param == "stand_in":
        names.add("torchtitan")
    code = tmp_path / "code"
    data = code / "torchtitan" / "components" / "data"
    if request.param == "torchtitan":
        pytest.importorskip(
            "torchtitan.components.data.loader",
            reason="torchtitan's main is not installed, since it wants an older datasets than the "
            "other tests: pip install --no-deps grain spmd_types torch_checkpointing tyro, and "
            "put a checkout of pytorch/torchtitan on PYTHONPATH",
        )
        code.mkdir()
    else:
        data.mkdir(parents=True)
        for package in (data.parent.parent, data.parent):
            (package / "__init__.py").write_text("")
        (data / "__init__.py").write_text(textwrap.dedent(STAND_IN))
        (data / "loader.py").write_text(textwrap.dedent(LOADER))
    (code / "titan_tokens.py").write_text(textwrap.dedent(PROCESSOR))
    before = {name: sys.modules[name] for name in sys.modules if name.partition(".")[0] in names}
    for name in before:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.syspath_prepend(str(code))
    for source, count in enumerate(DOCUMENTS):
        rows = [json.dumps({"source": source, "number": number}) for number in range(count)]
        (tmp_path / f"{source}.jsonl").write_text("\n".join(rows))
    yield importlib.import_module("titan_loader")
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]
    sys.modules.update(before)


def dataset_of(
    folder: Path, weights: tuple[float, ...] | None = None, pack: str | None = None
) -> Any:
    """torchtitan's configuration of both sources, mixed if there are weights."""
    titan = importlib.import_module("torchtitan.components.data")
    tokens = importlib.import_module("titan_tokens")
    parts = [
        titan.SingleDatasetConfig(
            source=titan.IndexedJsonlSource.Config(patterns=(str(folder / f"{source}.jsonl"),)),
            processor=tokens.Tokens.Config(),
            pre_filters=(lambda row: "number" in row,),
            post_filters=(lambda document: document is not None,),
        )
        for source in range(len(DOCUMENTS))
    ]
    if weights is None:
        dataset = titan.DatasetConcatConfig(datasets=tuple(parts))
    else:
        pairs = zip(parts, weights, strict=True)
        weighted = tuple(titan.WeightedDataset(dataset=one, weight=each) for one, each in pairs)
        dataset = titan.DatasetMixConfig(datasets=weighted)
    if pack == "split":
        return titan.ConcatThenSplitPackingConfig(dataset=dataset)
    if pack == "drop":
        return titan.FirstFitPackingConfig(dataset=dataset, num_packing_bins=5)
    return dataset


def rank_of(
    example: ModuleType,
    folder: Path,
    rank: int,
    world_size: int,
    weights: tuple[float, ...] | None = None,
    pack: str | None = None,
    **options: Any,
) -> Any:
    """The loader of one of the data-parallel ranks of a training, with 64 tokens in each step."""
    config = example.PenstockDataLoader.Config(dataset=dataset_of(folder, weights, pack), **options)
    return config.build(
        dp_rank=rank,
        dp_world_size=world_size,
        tokenizer=None,
        max_context_length=CONTEXT,
        num_tokens_per_batch=64 // world_size,
    )


def rows_of(batch: Any) -> list[Any]:
    """The rows of a packed batch: their tokens, positions and labels."""
    inputs, labels = batch
    parts = (inputs["input"], inputs["positions"], labels)
    return [*zip(*(part.view(-1, CONTEXT).tolist() for part in parts), strict=True)]


def in_turn(batches: Any) -> list[Any]:
    """The rows of a step, in the order of the job, which deals them out to the ranks in turn."""
    return [row for rows in zip(*batches, strict=True) for row in rows]


class Job:
    """The ranks of a training, in this process."""

    def __init__(self, example: ModuleType, folder: Path, world_size: int, **options: Any) -> None:
        self.ranks = [
            rank_of(example, folder, rank, world_size, **options) for rank in range(world_size)
        ]
        self.iterators: list[Any] = []

    def packed_steps(self, count: int | None = None) -> list[list[Any]]:
        """The rows of each of the next steps, or of all."""
        self.iterators = self.iterators or [iter(rank) for rank in self.ranks]
        steps = zip(*self.iterators, strict=True)  # strict: all ranks end together
        return [in_turn(map(rows_of, step)) for step in itertools.islice(steps, count)]

    def steps(self, count: int) -> list[list[int]]:
        """The tokens of each of the next steps, without padding, in the order of the ranks."""
        self.iterators = self.iterators or [iter(rank) for rank in self.ranks]
        return [self._step([next(one) for one in self.iterators]) for _ in range(count)]

    def epoch(self) -> list[list[int]]:
        """The steps of a job without `repeat`."""
        batches = zip(*map(iter, self.ranks), strict=True)  # strict: all ranks end together
        return [self._step(step) for step in batches]

    @staticmethod
    def _step(batches: Any) -> list[int]:
        assert all(len(inputs["input"]) == 64 // len(batches) for inputs, _ in batches)
        used = [(inputs["input"][labels != -100], labels) for inputs, labels in batches]
        return [*torch.cat([inputs for inputs, _ in used]).tolist()]

    def save(self, folder: Path) -> None:
        for rank, loader in enumerate(self.ranks):
            dcp.save({"dataloader": loader}, checkpoint_id=folder / str(rank))

    def load(self, folder: Path) -> None:
        for loader in self.ranks:
            dcp.load({"dataloader": loader}, checkpoint_id=folder / "0")

    def close(self) -> None:
        for loader in self.ranks:
            loader.close()


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    yield from pool_of(tmp_path, monkeypatch)


def sorted_steps(steps: list[list[int]]) -> list[list[int]]:
    return [sorted(step) for step in steps]


def test_finite_data_ends_with_the_same_step_on_all_ranks(
    example: ModuleType, tmp_path: Path
) -> None:
    epochs = [
        Job(example, tmp_path, world_size, repeat=False, num_workers=0).epoch()
        for world_size in (1, 2, 4)
    ]
    assert [len(epoch) for epoch in epochs] == [8, 8, 8]  # 64 documents, 8 in a step
    left_out = [number for count in DOCUMENTS for number in range(count) if number % 8 == 7]
    starts = [token for token in sum(epochs[0], []) if token >= FIRST_TOKEN]
    assert len(starts) == sum(DOCUMENTS) - len(left_out)
    assert sorted_steps(epochs[0]) == sorted_steps(epochs[1]) == sorted_steps(epochs[2])


def test_state_continues_on_2_and_4_and_1_ranks(example: ModuleType, tmp_path: Path) -> None:
    def job(world_size: int) -> Job:
        return Job(example, tmp_path, world_size, weights=(0.25, 0.75), num_workers=1)

    whole = job(1)
    expected = whole.steps(14)  # an epoch has 8
    whole.close()
    seen = []
    for count, world_size in ((3, 2), (7, 4), (4, 1)):
        part = job(world_size)
        if seen:
            part.load(tmp_path / "saved")
        seen += part.steps(count)
        part.save(tmp_path / "saved")
        part.close()
    assert sorted_steps(seen) == sorted_steps(expected)
    counts = [sum(seen, []).count(FIRST_TOKEN + source) for source in (0, 1)]
    assert counts[1] > 2 * counts[0] > 0  # weighted 3 to 1, without documents that are left out


def test_pool_makes_the_batches_of_local_workers(
    example: ModuleType, pool: PoolProcesses, tmp_path: Path
) -> None:
    pool.start_worker(processes=3)  # one for each rank, and a spare one
    local = Job(example, tmp_path, 2, num_workers=0)
    pooled = Job(example, tmp_path, 2, num_workers=0, pool=pool.endpoint)
    expected = local.steps(7)
    assert pooled.steps(7) == expected
    pooled.close()


def packed_oracle(epochs: int) -> list[Any]:
    """The rows of documents without random tokens, packed in the order of the mixture."""
    mixture = MixtureSampler(DOCUMENTS, when_exhausted="leave_out", seed=42)
    documents = []
    for index in itertools.chain.from_iterable(mixture for _ in range(epochs)):
        source = int(index >= DOCUMENTS[0])
        number = index - source * DOCUMENTS[0]
        if number % 8 != 7:
            values = torch.zeros(2 + 3 + number % 9, dtype=torch.long)
            values[0], values[1] = FIRST_TOKEN + source, number
            documents.append({"input_ids": values[:-1], "labels": values[1:]})
    padding = {"input_ids": 0, "labels": -100}
    packer = Packer(
        documents, CONTEXT, padding=padding, too_long="split", batch_size=8, rank=0, world_size=1
    )
    names = ("input_ids", "positions", "labels")
    return [[*zip(*(batch[name].tolist() for name in names), strict=True)] for batch in packer]


def without_draws(steps: list[Any]) -> list[Any]:
    """The rows without the processor's random tokens: starts of documents, positions, padding."""
    return [
        [
            (
                [token if token >= FIRST_TOKEN else 0 for token in tokens],
                positions,
                [label == -100 for label in labels],
            )
            for tokens, positions, labels in step
        ]
        for step in steps
    ]


def test_packed_rows_of_finite_data_are_the_same_on_all_ranks(
    example: ModuleType, tmp_path: Path
) -> None:
    epochs = [
        Job(example, tmp_path, world_size, repeat=False, num_workers=0, pack="split").packed_steps()
        for world_size in (1, 2, 4)
    ]
    assert epochs[0] == epochs[1] == epochs[2]
    assert without_draws(epochs[0]) == without_draws(packed_oracle(1))
    cut = Job(example, tmp_path, 1, repeat=False, num_workers=0, pack="drop")
    rows = sum(cut.packed_steps(), [])
    parts = [places[0] for _, places, _ in rows]
    assert parts == [0] * len(rows) and len(rows) < len(sum(epochs[0], []))


@pytest.mark.parametrize("pack", ["split", "drop"])
def test_packed_state_continues_on_2_and_4_and_1_ranks(
    example: ModuleType, tmp_path: Path, pack: str
) -> None:
    def job(world_size: int) -> Job:
        return Job(example, tmp_path, world_size, num_workers=1, pack=pack)

    whole = job(1)
    expected = whole.packed_steps(18)  # an epoch has almost 7
    whole.close()
    padding = sum(label == -100 for step in expected for *_, labels in step for label in labels)
    assert padding < {"split": 72, "drop": 288}[pack]  # of 1,152 tokens
    seen = []
    for count, world_size in ((3, 2), (9, 4), (6, 1)):
        part = job(world_size)
        if seen:
            part.load(tmp_path / "saved")
        seen += part.packed_steps(count)
        part.save(tmp_path / "saved")
        part.close()
    assert seen == expected


@pytest.mark.long
def test_pool_makes_the_packed_documents(
    example: ModuleType, pool: PoolProcesses, tmp_path: Path
) -> None:
    pool.start_worker(processes=3)
    local = Job(example, tmp_path, 2, num_workers=0, pack="split")
    pooled = Job(example, tmp_path, 2, num_workers=0, pack="split", pool=pool.endpoint)
    expected = local.packed_steps(9)
    assert pooled.packed_steps(9) == expected
    pooled.close()


def test_documents_are_made_once_for_the_ranks_of_a_process_group(
    example: ModuleType, tmp_path: Path
) -> None:
    job = tmp_path / "job"
    job.mkdir()
    folders = [str(EXAMPLES), str(tmp_path / "code"), str(Path(__file__).parent), *sys.path]
    environment = {
        **os.environ,
        "XDG_RUNTIME_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(folders),
        "TITAN_MADE": str(job / "made"),
    }
    given = {"data": str(tmp_path), "save_after": 3, "checkpoint": str(job / "saved")}
    ranks = GlooRanks(Path(__file__).with_name("titan_job.py"), job, 2, given, environment)
    ranks.finish_all()
    expected = Job(example, tmp_path, 1, num_workers=0, pack="split", repeat=False).packed_steps()
    steps = zip(*(ranks.lines(rank) for rank in range(2)), strict=True)
    assert [in_turn(step) for step in steps] == json.loads(json.dumps(expected))
    made = (job / "made").read_text().splitlines()
    assert sorted(made) == sorted(
        f"{source} {number}" for source in (0, 1) for number in range(DOCUMENTS[source])
    )
    rest = Job(example, tmp_path, 1, num_workers=0, pack="split", repeat=False)
    dcp.load({"dataloader": rest.ranks[0]}, checkpoint_id=job / "saved")
    assert rest.packed_steps() == expected[3:]


def test_datasets_that_cannot_continue_are_refused(example: ModuleType, tmp_path: Path) -> None:
    titan = importlib.import_module("torchtitan.components.data")
    stream = titan.HuggingFaceStreamingSource.Config(path="json", split="train")
    packed = dataset_of(tmp_path, pack="drop")
    for dataset, words in (
        (titan.SingleDatasetConfig(source=stream), "source must be read by index, got a stream"),
        (titan.DatasetConcatConfig(datasets=(packed,)), "got FirstFitPackingConfig in it"),
        (titan.ConcatThenSplitPackingConfig(dataset=packed), "got FirstFitPackingConfig in it"),
    ):
        config = example.PenstockDataLoader.Config(dataset=dataset)
        with pytest.raises(TypeError, match=words):
            config.build(
                dp_rank=0,
                dp_world_size=1,
                tokenizer=None,
                max_context_length=CONTEXT,
                num_tokens_per_batch=CONTEXT,
            )


@pytest.mark.long
@pytest.mark.parametrize("kind", ["chat", "images"])
@pytest.mark.parametrize("example", ["torchtitan"], indirect=True)
def test_its_own_data_continue_on_2_and_4_and_1_ranks(
    example: ModuleType, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(importlib.import_module("torchtitan").__file__ or "").parents[1]
    if not (root / "tests" / "assets" / "sft_test").exists():
        pytest.skip("torchtitan's checkout has no tests/assets")
    monkeypatch.chdir(root)  # the paths of its data sets are relative
    titan = importlib.import_module("torchtitan.components.data")
    tokenizers = importlib.import_module("torchtitan.components.tokenizer")
    folder = "tests/assets/tokenizer"
    options: dict[str, Any] = {}
    if kind == "chat":
        texts = importlib.import_module("torchtitan.hf_datasets.text_datasets")
        tokenizer = tokenizers.HuggingFaceTokenizer(tokenizer_path=folder)
        source = titan.HuggingFaceRandomAccessSource.Config(
            path="json",
            split="train",
            load_dataset_kwargs={"data_files": "tests/assets/sft_test/data.json"},
        )
        single = titan.SingleDatasetConfig(
            source=source,
            processor=texts.ChatProcessor.Config(messages_fn=messages_of),
            post_filters=(lambda sample: sample is not None,),
        )
        dataset = titan.FirstFitPackingConfig(dataset=single)
    else:
        images = importlib.import_module("torchtitan.hf_datasets.multimodal.mm_datasets")
        collators = importlib.import_module("torchtitan.hf_datasets.multimodal.mm_collator")
        names = {"image": "<|image_pad|>", "video": "<|video_pad|>", "pad": "<|endoftext|>"}
        names |= {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
        tokenizer = tokenizers.MultiModalTokenizer.Config(
            **{f"{name}_token": token for name, token in names.items()}
        ).build(tokenizer_path=folder)
        dataset = images.MM_DATASETS["cc12m-test"]
        small = replace(dataset.processor, min_pixels=784, max_pixels=200_000)
        dataset = replace(dataset, processor=small)
        options = {"collator": collators.MultiModalCollator.Config(), "downloads_streams": True}

    def ranks_of(world_size: int) -> list[Any]:
        config = example.PenstockDataLoader.Config(dataset=dataset, **options)
        return [
            config.build(
                dp_rank=rank,
                dp_world_size=world_size,
                tokenizer=tokenizer,
                max_context_length=512,
                num_tokens_per_batch=2048 // world_size,
            )
            for rank in range(world_size)
        ]

    def steps_of(ranks: list[Any], count: int) -> list[Any]:
        steps = zip(*ranks, strict=True)
        return [sorted(sum(map(parts_of, step), [])) for step in itertools.islice(steps, count)]

    whole = steps_of(ranks_of(1), 9)
    seen: list[Any] = []
    state: dict[str, Any] = {}
    for count, world_size in ((3, 2), (4, 4), (2, 1)):
        ranks = ranks_of(world_size)
        for rank in ranks:
            rank.load_state_dict(state)
        seen += steps_of(ranks, count)
        state = ranks[-1].state_dict()
        for rank in ranks:
            rank.close()
    assert seen == whole and len(whole[0]) == 4


def messages_of(sample: Any) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": sample["question"]},
        {"role": "assistant", "content": sample["answer"]},
    ]


def parts_of(batch: Any) -> list[Any]:
    """The rows of 512 tokens of a batch, or its images."""
    inputs, labels = batch
    if "pixel_values" not in inputs:
        parts = (inputs["input"], inputs["positions"], labels)
        return [*zip(*(part.view(-1, 512).tolist() for part in parts), strict=True)]
    grids = inputs["grid_thw"]
    images = inputs["pixel_values"].split(grids.prod(1).tolist())
    return [(grid.tolist(), one.tolist()) for grid, one in zip(grids, images, strict=True)]


def test_documents_without_tokens_are_reported(example: ModuleType, tmp_path: Path) -> None:
    for source, count in enumerate(DOCUMENTS):
        rows = [json.dumps({"source": source, "number": 7}) for _ in range(count)]
        (tmp_path / f"{source}.jsonl").write_text("\n".join(rows))
    for repeat in (False, True):
        job = Job(example, tmp_path, 1, num_workers=0, pack="split", repeat=repeat)
        with pytest.raises(ValueError, match="at least one document"):
            job.packed_steps(1)
