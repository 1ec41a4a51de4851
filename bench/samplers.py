# SPDX-License-Identifier: Apache-2.0
"""The guarantees of penstock's samplers, and their cost.

- shares: how far a source of a MixtureSampler is from its share, in samples, at the worst prefix.
- balance: the most expensive batch of a step of a CostBatchSampler over the mean of its ranks, on
  lengths with a log-normal distribution.
- time: the CPU time of the sampler, as a share of the CPU time that workers and trainer need for
  an epoch, the start of the workers included. "split": a text is split into words, which are looked
  up in a vocabulary. "ready": its tokens lie in memory, and they are not processed. Both are
  padded to the longest text of the batch.
"""

from __future__ import annotations

import argparse
import itertools
import random
import resource
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from figures import Record, add_report_options, report, run_main, summary
from table import aligned, number
from torch.utils.data import Dataset

from penstock import CostBatchSampler, DataLoader, MixtureSampler

WEIGHTS: dict[str, list[float]] = {
    "1 : 1": [1, 1],
    "0.7 : 0.3": [0.7, 0.3],
    "0.9 : 0.09 : 0.01": [0.9, 0.09, 0.01],
    "1 to 8": list(range(1, 9)),
    "powers of 2, 16": [2.0**-place for place in range(16)],
    "random, 100": np.random.default_rng(1).random(100).tolist(),
}
EVEN = 1.05
BATCH_SIZE = 16


def share_error(weights: list[float], sample_count: int, change_count: int) -> float:
    """Of every prefix since the weights were last set, and every source."""
    lengths = [sample_count] * len(weights)
    sampler = MixtureSampler(
        lengths, weights, when_exhausted="repeat", num_samples=sample_count * (change_count + 1)
    )
    order = iter(sampler)
    rng = np.random.default_rng(2)
    worst = 0.0
    for _ in range(change_count + 1):
        shares = np.array(sampler.weights) / sum(sampler.weights)
        sources = np.fromiter(itertools.islice(order, sample_count), np.int64) // sample_count
        given = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
        expected = np.arange(1, sample_count + 1)[:, None] * shares
        worst = max(worst, float(np.abs(given - expected).max()))
        sampler.set_weights(rng.permutation(weights).tolist())
    return worst


def lengths_of(count: int, sigma: float, length_max: int, seed: int) -> np.ndarray[Any, Any]:
    drawn = np.random.default_rng(seed).lognormal(np.log(300), sigma, count)
    return np.clip(np.ceil(drawn), 1, length_max)


def balance(costs: Any, budget: int, rank_count: int) -> list[float]:
    """The most expensive batch over the mean of the ranks, of each step of an epoch."""
    ranks = [
        CostBatchSampler(costs, budget, rank=rank, world_size=rank_count)
        for rank in range(rank_count)
    ]
    found = []
    for step in zip(*ranks, strict=True):
        loads = [costs[batch].sum() for batch in step]
        found.append(float(max(loads) / np.mean(loads)))
    return found


class Tokens(Dataset[torch.Tensor]):
    """Texts of given lengths, one after the other in memory."""

    def __init__(self, lengths: Any) -> None:
        self.ends = np.cumsum(lengths.astype(np.int64)).tolist()
        self.tokens = torch.randint(0, 50_000, (self.ends[-1],))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tokens[self.ends[index - 1] if index else 0 : self.ends[index]]


class Words(Dataset[torch.Tensor]):
    """Texts of given lengths, as text."""

    def __init__(self, lengths: Any) -> None:
        draw = random.Random(0)
        words = [f"w{word:x}" for word in range(20_000)]
        self.vocabulary = {word: 1 + token for token, word in enumerate(words)}
        self.texts = [" ".join(draw.choices(words, k=int(length))) for length in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([self.vocabulary[word] for word in self.texts[index].split()])


def padded(texts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)


def cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def sampler_cpu_s(sampler: Any) -> tuple[float, int]:
    begin = time.process_time()
    batch_count = sum(1 for _ in sampler)
    return time.process_time() - begin, batch_count


def loader_cpu_s(dataset: Any, **options: Any) -> float:
    """Of an epoch, with the start of the workers."""
    begin = cpu_s()
    for _ in DataLoader(dataset, collate_fn=padded, num_workers=2, **options):
        pass
    return cpu_s() - begin


def measure(args: argparse.Namespace) -> Iterator[Record]:
    for name, weights in WEIGHTS.items():
        for change_count in (0, 10):
            worst = share_error(weights, args.samples, change_count)
            parameters = {"weights": name, "changes": change_count, "samples": args.samples}
            yield summary("samplers/share_error", parameters, [worst])
    for sigma, budget in itertools.product((0.5, 1.0, 1.5), (8192, 32768)):
        for rank_count in args.ranks:
            ratios = [
                balance(lengths_of(args.texts, sigma, 2048, seed), budget, rank_count)
                for seed in range(args.rounds)
            ]
            steps = list(itertools.chain.from_iterable(ratios))
            but_last = list(itertools.chain.from_iterable(one[:-1] for one in ratios))
            record = summary(
                "samplers/max_over_mean",
                {"sigma": sigma, "budget": budget, "ranks": rank_count, "texts": args.texts},
                steps,
            )
            record["mean"] = float(np.mean(steps))
            record["worst"] = max(steps)
            record["worst_but_last"] = max(but_last, default=1.0)
            record["beyond"] = float(np.mean(np.array(steps) > EVEN))
            yield record
    lengths = lengths_of(args.texts // 4, 1.0, 2048, 0)
    half = len(lengths) // 2
    samplers = {
        "CostBatchSampler": lambda: CostBatchSampler(lengths, 8192, rank=0, world_size=1),
        "CostBatchSampler, 8 ranks": lambda: CostBatchSampler(lengths, 8192, rank=3, world_size=8),
        "MixtureSampler": lambda: MixtureSampler(
            [half, len(lengths) - half], [0.7, 0.3], when_exhausted="repeat"
        ),
    }
    for data, dataset in {"split": Words(lengths), "ready": Tokens(lengths)}.items():
        for name, make in samplers.items():
            yield from timed(name, make, data, dataset, args.rounds)


def timed(name: str, make: Any, data: str, dataset: Any, round_count: int) -> Iterator[Record]:
    shares, costs_us = [], []
    for _ in range(round_count):
        alone_s, count = sampler_cpu_s(make())
        options = {"batch_sampler": make()}
        if name == "MixtureSampler":
            count //= BATCH_SIZE
            options = {"sampler": make(), "batch_size": BATCH_SIZE}
        shares.append(alone_s / loader_cpu_s(dataset, **options))
        costs_us.append(1e6 * alone_s / count)
    parameters = {"sampler": name, "data": data}
    yield summary("samplers/share_of_loader", parameters, shares)
    yield summary("samplers/us_per_batch", parameters, costs_us)


def table(everything: list[Record]) -> str:
    errors = [["weights", "constant", "after each of 10 changes"]]
    found = {
        (r["parameters"]["weights"], r["parameters"]["changes"]): r["median"]
        for r in everything
        if r["name"] == "samplers/share_error"
    }
    for weights in dict.fromkeys(weights for weights, _ in found):
        errors.append([weights, *(f"{found[weights, changes]:.3f}" for changes in (0, 10))])
    heads = ["sigma", "budget", "ranks", "steps", "mean", "worst", "worst without last steps"]
    ratios = [[*heads, f"steps beyond {EVEN}"]]
    for r in everything:
        if r["name"] == "samplers/max_over_mean":
            names = ("sigma", "budget", "ranks")
            figures = [f"{r[name]:.4f}" for name in ("mean", "worst", "worst_but_last")]
            facts = [str(r["parameters"][name]) for name in names]
            ratios.append([*facts, number(r["n"]), *figures, f"{100 * r['beyond']:.2f} %"])
    times = [["sampler", "texts", "us per batch", "% of the loader's CPU time", "10th to 90th"]]
    by_name = {(r["name"], *r["parameters"].values()): r for r in everything}
    for (name, *what), r in by_name.items():
        if name == "samplers/share_of_loader":
            us = by_name[("samplers/us_per_batch", *what)]["median"]
            spread = f"{100 * r['p10']:.2f} to {100 * r['p90']:.2f}"
            times.append([*map(str, what), number(us), f"{100 * r['median']:.2f}", spread])
    return "\n\n".join(aligned(rows) for rows in (errors, ratios, times))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--samples", type=int, default=20_000, help="samples of a prefix (default: 20000)")
    add("--texts", type=int, default=50_000, help="number of log-normal lengths (default: 50000)")
    add("--ranks", type=int, nargs="+", default=[8], help="numbers of ranks (default: 8)")
    add("--rounds", type=int, default=5, help="number of seeds and timed epochs (default: 5)")
    add("--quick", action="store_true", help="smoke test with few samples")
    add_report_options(parser)
    args = parser.parse_args()
    if args.quick:
        args.samples, args.texts, args.rounds = 500, 2000, 1
    return args


def main() -> int:
    done = report("samplers", parse_arguments(), measure, table)
    return 2 if done is None else 0


if __name__ == "__main__":
    run_main(main)
