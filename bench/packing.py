# SPDX-License-Identifier: Apache-2.0
"""Padding of packed rows against Grain's packing, and the cost of packing against tokenizing.

- padding: the share of padding in all rows of a pass, with log-normal lengths cut to the length of
  a row, the same lengths for each packer. Grain is left out if it is not installed; only its rows
  with tokens are counted.
- cost: time per token of a byte-level BPE tokenizer of the `tokenizers` library, trained on this
  repository's pages and on the standard library; and of the packer, with the token lists that the
  tokenizer returns, and with tensors. Tokenizing and packing take turns.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import Record, add_report_options, log, report, run_main, summary
from table import aligned

from penstock import Packer

ROOT = Path(__file__).resolve().parents[1]


def lengths_of(count: int, sigma: float, row_length: int, seed: int) -> np.ndarray[Any, Any]:
    drawn = np.random.default_rng(seed).lognormal(np.log(300), sigma, count)
    return np.clip(np.ceil(drawn), 1, row_length).astype(np.int64)


def penstock_padding(lengths: np.ndarray[Any, Any], row_length: int, bins: int) -> float:
    policy: Any = "best_fit" if bins > 1 else "next_fit"
    packer = Packer([], row_length, policy=policy, open_bins=bins)
    return packer.plan(lengths).padding_fraction


def grain_padding(name: str, lengths: np.ndarray[Any, Any], row_length: int, bins: int) -> float:
    import grain
    import grain.experimental

    documents = [{"tokens": np.ones(length, dtype=np.int32)} for length in lengths]
    packed = getattr(grain.experimental, name)(
        grain.MapDataset.source(documents).to_iter_dataset(),
        length_struct={"tokens": row_length},
        num_packing_bins=bins,
        shuffle_bins=False,
    )
    rows = tokens = 0
    for row in packed:
        used = int((row["tokens_segment_ids"] > 0).sum())
        rows += used > 0
        tokens += used
    assert tokens == lengths.sum(), "Grain must pack all tokens"
    return 1 - tokens / (rows * row_length)


def padding_kinds() -> dict[str, Callable[[np.ndarray[Any, Any], int, int], float]]:
    kinds: dict[str, Any] = {
        "penstock, next_fit": lambda lengths, length, _: penstock_padding(lengths, length, 1),
        "penstock, best_fit": penstock_padding,
    }
    try:
        import grain.experimental  # noqa: F401
    except ImportError as error:
        log(f"Grain is left out: {error}")
        return kinds
    for shown, name in (("first", "FirstFitPackIterDataset"), ("best", "BestFitPackIterDataset")):
        kinds[f"Grain, {shown}-fit"] = lambda lengths, length, bins, name=name: grain_padding(
            name, lengths, length, bins
        )
    return kinds


def texts_of(count: int) -> list[str]:
    """Pieces of this repository's pages and of the standard library, of log-normal lengths."""
    folder = Path(inspect.getfile(json)).parents[1]
    files = sorted([*(ROOT / "docs").rglob("*.md"), *folder.glob("*.py")])
    whole = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    draw = random.Random(0)
    found = []
    for _ in range(count):
        length = int(draw.lognormvariate(7, 1)) + 1  # characters
        begin = draw.randrange(max(1, len(whole) - length))
        found.append(whole[begin : begin + length])
    return found


def tokenizer_of(texts: list[str]) -> Any:
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=16_000, show_progress=False)
    return tokenizer


def cost(text_count: int, round_count: int, row_length: int) -> Iterator[Record]:
    texts = texts_of(text_count)
    tokenizer = tokenizer_of(texts)
    documents = [tokenizer.encode(text).ids for text in texts]
    tensors = [torch.tensor(one) for one in documents]
    streams = [{"input_ids": one, "labels": one, "loss_mask": one > 0} for one in tensors]
    tokens = sum(map(len, documents))

    def pack(packed: list[Any]) -> None:
        for _ in Packer(packed, row_length, too_long="split", batch_size=8):
            pass

    kinds: dict[str, Callable[[], object]] = {
        "tokenize": lambda: [tokenizer.encode(text).ids for text in texts],
        "pack lists": lambda: pack(documents),
        "pack tensors": lambda: pack(tensors),
        "pack 3 streams of tensors": lambda: pack(streams),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(round_count):
        for kind, run in kinds.items():
            begin = time.process_time()
            run()
            times[kind].append(1e9 * (time.process_time() - begin) / tokens)
    parameters = {"texts": text_count, "tokens": tokens, "row_length": row_length}
    for kind, found in times.items():
        yield summary("packing/ns_per_token", {"kind": kind, **parameters}, found)
        shares = [one / whole for one, whole in zip(found, times["tokenize"], strict=True)]
        yield summary("packing/share_of_tokenizing", {"kind": kind, **parameters}, shares)


def measure(args: argparse.Namespace) -> Iterator[Record]:
    kinds = padding_kinds()
    for sigma in (0.5, 1.0, 1.5):
        for row_length in (2048, 8192):
            for bins in (8, 64):
                every = [
                    lengths_of(args.texts, sigma, row_length, seed) for seed in range(args.seeds)
                ]
                for kind, padding in kinds.items():
                    parameters = {"sigma": sigma, "row_length": row_length, "bins": bins}
                    found = [padding(lengths, row_length, bins) for lengths in every]
                    yield summary("packing/padding", {**parameters, "kind": kind}, found, 6)
    yield from cost(args.timed_texts, args.rounds, 4096)


def table(everything: list[Record]) -> str:
    padding = [r for r in everything if r["name"] == "packing/padding"]
    kinds = list(dict.fromkeys(r["parameters"]["kind"] for r in padding))
    rows = [["sigma", "row", "open bins", *kinds]]
    found = {tuple(r["parameters"].values()): r["median"] for r in padding}
    for case in dict.fromkeys(key[:-1] for key in found):
        rows.append([*map(str, case), *(f"{100 * found[(*case, kind)]:.2f} %" for kind in kinds)])
    costs = [["work", "ns per token", "10th to 90th", "% of tokenizing"]]
    by_name = {(r["name"], r["parameters"].get("kind")): r for r in everything}
    for (name, kind), r in by_name.items():
        if name == "packing/ns_per_token":
            share = by_name["packing/share_of_tokenizing", kind]["median"]
            spread = f"{r['p10']:.1f} to {r['p90']:.1f}"
            costs.append([str(kind), f"{r['median']:.1f}", spread, f"{100 * share:.2f}"])
    return "\n\n".join(map(aligned, (rows, costs)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--texts", type=int, default=5000, help="number of log-normal lengths (default: 5000)")
    add("--seeds", type=int, default=1, help="draws of the lengths (default: 1)")
    add("--timed-texts", type=int, default=2000, help="texts to tokenize (default: 2000)")
    add("--rounds", type=int, default=7, help="timed rounds (default: 7)")
    add("--quick", action="store_true", help="smoke test with few documents")
    add_report_options(parser)
    args = parser.parse_args()
    if args.quick:
        args.texts, args.timed_texts, args.rounds = 1000, 100, 1
    return args


def main() -> int:
    done = report("packing", parse_arguments(), measure, table)
    return 2 if done is None else 0


if __name__ == "__main__":
    run_main(main)
