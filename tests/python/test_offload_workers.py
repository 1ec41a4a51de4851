# SPDX-License-Identifier: Apache-2.0
"""The cut end to end: a real loader, real worker processes, and bit-for-bit the same training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cut_models import CASES, Case, images, rows
from offload_training import warnings_of
from scheduled_workers import Scheduled
from test_offload import bits, fresh, train
from test_offload_graphs import ThreeGraphsAndABranch

from penstock import DataLoader
from penstock.cut.cut_graph import CheckedBoundary
from penstock.cut.offloading import detach, offload
from penstock.tracking.leaves import flatten_batch

BATCH_COUNT = 10


class Batches(torch.utils.data.Dataset[Any]):
    """Ready batches by number, for `batch_size=None`."""

    def __init__(self, case: Case) -> None:
        self.batches = [case.make_batch(k) for k in range(BATCH_COUNT)]

    def __len__(self) -> int:
        return BATCH_COUNT

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


class Samples(torch.utils.data.Dataset[Any]):
    """Samples that collate combines into batches; the last batch is a small one."""

    def __init__(self, count: int) -> None:
        self.images, self.labels = zip(*(images(k) for k in range(count // 6 + 1)), strict=True)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index // 6][index % 6], self.labels[index // 6][index % 6]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cut_in_worker_processes_is_bit_identical(case: Case) -> None:
    reference_model = fresh(case.make_model)
    arguments: dict[str, Any] = {"batch_size": None, "num_workers": 2, "persistent_workers": True}
    reference = torch.utils.data.DataLoader(Batches(case), **arguments)
    expected = [train(reference_model, reference, case.loss) for _ in range(2)]
    loader: DataLoader[Any] = DataLoader(Batches(case), **arguments)
    model = offload(fresh(case.make_model), loader, cut="maximal", verify_every=3)
    assert [train(model, loader, case.loss) for _ in range(2)] == expected
    assert loader.plan is not None and loader.plan.refused is None
    assert bool(loader.plan.moved) == case.moves
    if case.moves:
        assert carries_boundary_tensors(loader)
    detach(model)
    assert loader.plan is None
    assert not carries_boundary_tensors(loader)
    del loader, reference


def compiled(case: Case) -> Any:
    return torch.compile(fresh(case.make_model), backend="aot_eager")


def traced(case: Case) -> Any:
    return torch.jit.trace(fresh(case.make_model), case.make_batch(0)[0])


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [compiled, traced])
def test_compiled_and_traced_models_are_cut_in_worker_processes(make: Any) -> None:
    case = CASES[0]
    arguments: dict[str, Any] = {"batch_size": None, "num_workers": 2, "persistent_workers": True}
    model = make(case)
    reference = torch.utils.data.DataLoader(Batches(case), **arguments)
    expected = [train(model, reference, case.loss) for _ in range(2)]
    loader: DataLoader[Any] = DataLoader(Batches(case), **arguments)
    model = offload(make(case), loader, cut="maximal", verify_every=3)
    assert [train(model, loader, case.loss) for _ in range(2)] == expected
    assert loader.plan is not None and loader.plan.moved
    assert carries_boundary_tensors(loader)
    del loader, reference


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_model_of_several_graphs_is_cut_in_worker_processes(method: str) -> None:
    case = Case("", ThreeGraphsAndABranch, rows, CASES[5].loss, True)
    arguments: dict[str, Any] = {
        "batch_size": None,
        "num_workers": 2,
        "persistent_workers": True,
        "multiprocessing_context": method,
    }
    reference_model = fresh(case.make_model)
    reference = torch.utils.data.DataLoader(Batches(case), **arguments)
    loader: DataLoader[Any] = DataLoader(Batches(case), **arguments)
    model = offload(fresh(case.make_model), loader, cut="maximal", verify_every=3)
    for _ in range(3):
        expected = train(reference_model, reference, case.loss)
        is_same = train(model, loader, case.loss) == expected
        assert is_same
    assert loader.plan is not None and len(loader.plan.moved) >= 6
    assert loader.stats().boundary_batches >= BATCH_COUNT
    detach(model)


def carries_boundary_tensors(loader: DataLoader[Any]) -> bool:
    """Whether the last batch of another epoch carries workers' results."""
    last = list(loader)[-1]
    assert loader._run.provenance is not None
    provenance = loader._run.provenance.lookup(flatten_batch(last)[0])
    assert provenance is not None
    return bool(provenance.handle.boundary)


@pytest.mark.long
@pytest.mark.slow
def test_collated_batches_and_small_last_batch_match_uncut() -> None:
    case = CASES[0]
    arguments: dict[str, Any] = {"batch_size": 6, "shuffle": True, "num_workers": 2}
    reference_model = fresh(case.make_model)
    reference = torch.utils.data.DataLoader(Samples(40), **arguments)
    expected = [train(reference_model, reference, case.loss) for _ in range(3)]
    loader: DataLoader[Any] = DataLoader(Samples(40), **arguments)
    model = offload(fresh(case.make_model), loader, cut="maximal", verify_every=2)
    assert [train(model, loader, case.loss) for _ in range(3)] == expected
    assert loader.plan is not None and loader.plan.moved


@pytest.mark.long
@pytest.mark.slow
def test_workers_added_mid_epoch_run_the_prefix() -> None:
    case = CASES[0]
    arguments: dict[str, Any] = {"batch_size": 6, "shuffle": True, "seeding": "batch"}
    reference_model = fresh(case.make_model)
    reference: DataLoader[Any] = DataLoader(Samples(60), **arguments)
    expected = [train(reference_model, reference, case.loss) for _ in range(2)]
    loader: DataLoader[Any] = DataLoader(Samples(60), num_workers="auto", **arguments)
    loader._run.tuner = Scheduled([2, 1, 3, 1], every=2)
    model = offload(fresh(case.make_model), loader, cut="maximal")
    assert train(model, loader, case.loss) == expected[0]
    assert loader.plan is not None and loader.plan.moved
    before = loader.stats().boundary_batches
    assert train(model, loader, case.loss) == expected[1]
    assert loader.stats().boundary_batches == before + 10
    assert int(loader.num_workers) == 1


@pytest.mark.slow
def test_only_the_first_batch_of_each_worker_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: Counter[int] = Counter()
    verify = CheckedBoundary._verify

    def counted(self: CheckedBoundary, cut: Any, call: Any, boundary: Any) -> Any:
        compared[call.handle.maker] += 1
        return verify(self, cut, call, boundary)

    monkeypatch.setattr(CheckedBoundary, "_verify", counted)
    case = CASES[0]
    loader: DataLoader[Any] = DataLoader(Samples(180), batch_size=6, num_workers=3)
    model = offload(fresh(case.make_model), loader, cut="maximal", verify_every=10**9)
    train(model, loader, case.loss)
    assert loader.stats().boundary_batches > 15
    assert sorted(compared.values()) == [1, 1, 1], compared


LOUD_COUNT = 20  # batches


class Fading(torch.utils.data.Dataset[Any]):
    """Batches of loud waves, and then of waves so quiet that their squares are denormal numbers."""

    def __len__(self) -> int:
        return 2 * LOUD_COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        loudness = 1.0 if index < LOUD_COUNT else 1e-20
        return torch.full((4, 16), loudness), torch.arange(4) % 2


class Power(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(16, 2)

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        return self.net((waves * waves * 1e38).clamp(max=2.0))


@pytest.mark.slow
def test_spawned_workers_flush_denormals_like_the_trainer() -> None:
    """The first batches were equal, and the losses of the quiet ones were not torch's."""
    loss = CASES[5].loss

    def torchs() -> list[bytes]:
        loader = torch.utils.data.DataLoader(Fading(), batch_size=None, num_workers=1)
        return train(fresh(Power), loader, loss)

    unflushed = torchs()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU flushes no denormal numbers")
    try:
        expected = torchs()
        assert expected != unflushed
        loader: DataLoader[Any] = DataLoader(
            Fading(), batch_size=None, num_workers=1, multiprocessing_context="spawn"
        )
        model = offload(fresh(Power), loader, cut="maximal")
        assert train(model, loader, loss) == expected
    finally:
        torch.set_flush_denormal(False)
    assert loader.plan is not None
    assert {call.operator.partition(" ")[0] for call in loader.plan.moved} == {"mul", "clamp"}
    assert loader.stats().boundary_batches > LOUD_COUNT


@pytest.mark.slow
def test_trainer_does_not_run_operators_moved_to_workers() -> None:
    case = CASES[0]
    loader: DataLoader[Any] = DataLoader(
        Batches(case), batch_size=None, num_workers=2, persistent_workers=True
    )
    model = offload(fresh(case.make_model), loader, cut="maximal")
    for batch in loader:
        model(batch[0])
    batches = list(loader)
    results = [model(batches[0][0])]  # the first of an epoch is compared with the forward
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        results += [model(batch[0]) for batch in batches[1:]]
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::convolution"] == 2 * (BATCH_COUNT - 1)
    assert not {"aten::_upsample_bilinear2d_aa", "aten::div", "aten::sub"} & counts.keys()
    assert len(results) == BATCH_COUNT


@pytest.mark.slow
def test_operator_error_in_worker_is_raised_in_the_trainer() -> None:
    class Classes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hot = torch.nn.functional.one_hot(x.long().abs()[:, 0], 5)
            return self.net(hot.float())

    case = Case("", Classes, lambda k: (rows(k)[0].clamp(-4, 4), rows(k)[1]), CASES[5].loss, True)
    dataset = Batches(case)
    dataset.batches[-1] = (torch.full((10, 20), 9.0), dataset.batches[-1][1])
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=None, num_workers=2, persistent_workers=True
    )
    model = offload(fresh(Classes), loader, cut="maximal")
    reference = fresh(Classes)
    for _ in range(2):
        batches = list(loader)
        for batch in batches[:-1]:
            assert bits(model(batch[0])) == bits(reference(batch[0]))
        with pytest.raises(RuntimeError, match="Class values must be smaller"):
            model(batches[-1][0])
    assert loader.plan is not None and loader.plan.moved


@pytest.mark.long
@pytest.mark.slow
def test_thread_dependent_kernels_return_to_the_trainer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Observed: torch.stft of 32 waves gives other bits on 2 threads than on 1. A sum of many
    # numbers does so wherever it is run, since each thread adds up a part, if not for every batch.
    class Level(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(1, 3)

        def forward(self, wave: torch.Tensor) -> torch.Tensor:
            return self.net((wave * 0.5).sum().reshape(1, 1))

    def long_wave(seed: int) -> torch.Tensor:
        return torch.randn(32, 16000, generator=torch.Generator().manual_seed(seed))

    sums = []
    for count in (1, 2):
        torch.set_num_threads(count)
        sums.append([bits((long_wave(seed) * 0.5).sum()) for seed in range(4 * BATCH_COUNT)])
    seeds = [seed for seed, (one, two) in enumerate(zip(*sums, strict=True)) if one != two]
    assert len(seeds) >= BATCH_COUNT
    labels = torch.tensor([1])
    case = Case("", Level, lambda k: (long_wave(seeds[k]), labels), CASES[5].loss, True)
    reference = torch.utils.data.DataLoader(Batches(case), batch_size=None, num_workers=2)
    expected = train(fresh(case.make_model), reference, case.loss)
    loader: DataLoader[Any] = DataLoader(
        Batches(case), batch_size=None, num_workers=2, prefetch_factor=1
    )
    model = offload(fresh(case.make_model), loader, cut="maximal")
    assert train(model, loader, case.loss) == expected
    assert loader.plan is not None
    assert {call.operator.partition(" ")[0] for call in loader.plan.moved} == {"mul"}
    told = [message for message in warnings_of(caplog) if "differs from the trainer's" in message]
    assert told and all("on 1 thread, the trainer on 2" in message for message in told)


@pytest.mark.slow
def test_offload_is_refused_without_workers() -> None:
    case = CASES[5]
    loader: DataLoader[Any] = DataLoader(Batches(case), batch_size=None)
    model = offload(fresh(case.make_model), loader)
    reference = torch.utils.data.DataLoader(Batches(case), batch_size=None)
    assert train(model, loader, case.loss) == train(fresh(case.make_model), reference, case.loss)
    assert loader.plan is not None and "num_workers=0" in str(loader.plan.refused)
