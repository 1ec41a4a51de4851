# SPDX-License-Identifier: Apache-2.0
"""Many small cases through one loader: each is a separate batch; all that differ are named."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch.utils.data
from stream_oracle import describe, error_text, first_difference, without_frames
from torch.utils.data import Dataset

Cases = Mapping[str, Callable[[], Any]]


class SamplesOfCases(Dataset[Any]):
    """Its index is a case's name and the number of a sample in that case."""

    def __init__(self, cases: Cases) -> None:
        self.cases = cases

    def __getitem__(self, index: tuple[str, int]) -> Any:
        name, number = index
        return self.cases[name]()[number]


class WholeCases(Dataset[Any]):
    """Its index is a case's name."""

    def __init__(self, cases: Cases) -> None:
        self.cases = cases

    def __getitem__(self, name: str) -> Any:
        return self.cases[name]()


def in_batches(cases: Cases) -> dict[str, Any]:
    """The result of collate_fn for each case's samples."""
    batches = [[(name, number) for number in range(len(make()))] for name, make in cases.items()]
    return {"dataset": SamplesOfCases(cases), "batch_sampler": batches}


def one_by_one(cases: Cases) -> dict[str, Any]:
    """Each case's value by itself."""
    return {"dataset": WholeCases(cases), "sampler": list(cases), "batch_size": None}


def outcomes(loader_class: type, cases: Cases, arguments: dict[str, Any]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        iterator = iter(loader_class(**arguments))
        for name in cases:
            try:
                seen[name] = describe(next(iterator))
            except StopIteration:
                # The rest is lost too, and is not reported again.
                return {**dict.fromkeys(cases, "not reached"), **seen, name: "the stream ended"}
            except Exception as error:
                without_frames(error)
                assert "timed out" not in str(error), f"the batch of {name!r} did not come"
                seen[name] = error_text(error)
    return seen


def assert_same_outcomes(
    loader_class: type, cases: Cases, arrange: Callable[[Cases], dict[str, Any]], **options: Any
) -> None:
    """Fails with every case whose result differs from torch's loader."""
    if options.get("num_workers"):
        options["timeout"] = 20  # a batch that cannot be sent makes torch's loader wait for ever
    want = outcomes(torch.utils.data.DataLoader, cases, {**arrange(cases), **options})
    got = outcomes(loader_class, cases, {**arrange(cases), **options})
    differences = {name: first_difference(got[name], want[name], "batch") for name in cases}
    different = {
        name: text
        for name, text in differences.items()
        if text is not None and got[name] != "not reached"
    }
    assert not different, "\n".join(f"{name}: {text}" for name, text in different.items())
