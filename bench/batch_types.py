# SPDX-License-Identifier: Apache-2.0
"""What does the container of a batch cost? Time and bytes of each kind of batch, compared with a
dict with the same tensors, with a local worker and with a pool's.

The samples are ready, so a batch costs only its way to the trainer. The kinds take turns in each
round, and each round compares with the dict's batches of the same round.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from figures import Record, add_report_options, report, summary
from pool_host import PoolHost

import penstock
from penstock import DataLoader, Pool

HERE = Path(__file__).resolve().parent
WAYS = ("local", "pool")
LENGTHS = 64  # sequences of a jagged batch


@dataclasses.dataclass
class Fields:
    input_ids: torch.Tensor
    attention_mask: torch.Tensor


class Unregistered:
    """A class of the program's that penstock cannot take apart: its batches are pickles."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.values = [(index, one) for index, one in enumerate(tensors)]


def _dict(ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": mask}


def _encoding(ids: torch.Tensor, mask: torch.Tensor) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding(_dict(ids, mask))


def _feature(ids: torch.Tensor, mask: torch.Tensor) -> Any:
    from transformers import BatchFeature

    return BatchFeature(_dict(ids, mask))


def _tensordict(ids: torch.Tensor, mask: torch.Tensor) -> Any:
    from tensordict import TensorDict

    return TensorDict(_dict(ids, mask), batch_size=[len(ids)])


def _images(ids: torch.Tensor, mask: torch.Tensor) -> Any:
    from torchvision import tv_tensors

    return [tv_tensors.Image(ids.unsqueeze(0)), tv_tensors.Mask(mask)]


def _graph(ids: torch.Tensor, mask: torch.Tensor) -> Any:
    from torch_geometric.data import Data

    return Data(x=ids, y=mask)


def _jagged(ids: torch.Tensor, mask: torch.Tensor) -> Any:
    offsets = torch.linspace(0, ids.numel(), LENGTHS + 1).long()
    return [
        torch.nested.nested_tensor_from_jagged(one.flatten(), offsets=offsets)
        for one in (ids, mask)
    ]


def _coo(ids: torch.Tensor, mask: torch.Tensor) -> Any:
    """As many bytes: two indices and a value for three numbers."""
    count = 2 * ids.numel() // 3
    places = torch.arange(count)
    indices = torch.stack([places // 1000, places % 1000])
    values = torch.cat([ids.flatten(), mask.flatten()])[:count]
    shape = (count // 1000 + 1, 1000)
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True)


def _csr(ids: torch.Tensor, mask: torch.Tensor) -> Any:
    rows, columns = ids.numel() // 1000, torch.arange(1000).repeat(ids.numel() // 1000)
    values = mask.flatten()[: len(columns)]
    return torch.sparse_csr_tensor(torch.arange(rows + 1) * 1000, columns, values, (rows, 1000))


KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "dict": _dict,
    "OrderedDict": lambda ids, mask: collections.OrderedDict(_dict(ids, mask)),
    "defaultdict": lambda ids, mask: collections.defaultdict(list, _dict(ids, mask)),
    "dataclass, registered": Fields,
    "BatchEncoding": _encoding,
    "BatchFeature": _feature,
    "TensorDict": _tensordict,
    "tv_tensors": _images,
    "PyG Data": _graph,
    "jagged": _jagged,
    "sparse COO": _coo,
    "sparse CSR": _csr,
    "object, pickled": lambda ids, mask: Unregistered([ids, mask]),
}


class Ready(torch.utils.data.Dataset[Any]):
    """A batch that is there already."""

    def __init__(self, kind: str, count: int, mib: float) -> None:
        self.kind, self.count, self.mib = kind, count, mib
        self._batch: Any = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if self._batch is None:
            rows = int(self.mib * (1 << 20)) // (2 * 8 * 512)
            ids = torch.arange(rows * 512).view(rows, 512)
            self._batch = KINDS[self.kind](ids, torch.ones_like(ids))
        return self._batch


def as_is(batch: Any) -> Any:
    return batch


def measure(kind: str, way: str, host: PoolHost, args: argparse.Namespace) -> dict[str, float]:
    dataset = Ready(kind, args.warmup_batches + args.batches, args.mib)
    options: dict[str, Any] = {"batch_size": None, "collate_fn": as_is, "timeout": 60}
    if way == "local":
        options |= {"num_workers": 1, "multiprocessing_context": "fork"}
    else:
        trusts = kind.endswith("pickled")
        pool = Pool(host.endpoint, keys=host.keys, code_paths=[str(HERE)], trust_workers=trusts)
        options |= {"pool": pool, "seeding": "batch"}
    with DataLoader(dataset, **options) as loader:
        batches = iter(loader)
        for _ in range(args.warmup_batches):
            next(batches)
        before = loader.stats().batch_bytes
        began = time.perf_counter()
        for _ in range(args.batches):
            next(batches)
        seconds = time.perf_counter() - began
        sent = loader.stats().batch_bytes - before
    return {"ms": 1e3 * seconds / args.batches, "mb": sent / args.batches / 1e6}


def _is_there(kind: str) -> bool:
    try:
        KINDS[kind](torch.zeros(2000, 1, dtype=torch.int64), torch.zeros(2000, 1))
    except ImportError as error:
        print(f"batch_types: {kind} is left out: {error}", file=sys.stderr)
        return False
    return True


def measure_all(args: argparse.Namespace) -> Iterator[Record]:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="(?s).*(beta|prototype|are pickled|Sparse invariant)")
    penstock.register_batch_type(Fields)
    kinds = [kind for kind in KINDS if kind in ("dict", *args.kinds) and _is_there(kind)]
    found: dict[tuple[str, str], list[dict[str, float]]] = collections.defaultdict(list)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        host = stack.enter_context(PoolHost(Path(folder)))
        host.start_command(1)
        for round_index in range(args.rounds):
            for kind in kinds if round_index % 2 == 0 else reversed(kinds):
                for way in WAYS:
                    found[kind, way].append(measure(kind, way, host, args))
    for (kind, way), figures in found.items():
        parameters = {"kind": kind, "way": way, "mib": args.mib}
        pairs = zip(figures, found["dict", way], strict=True)
        ratios = [one["ms"] / other["ms"] for one, other in pairs]
        yield summary("batch_types/ms", parameters, [one["ms"] for one in figures])
        yield summary("batch_types/mb", parameters, [one["mb"] for one in figures])
        yield summary("batch_types/ratio", parameters, ratios)


def table(records: list[Record]) -> str:
    figures = {(r["name"], r["parameters"]["kind"], r["parameters"]["way"]): r for r in records}
    lines = [
        "| batch | MB | local, ms | of the dict's time | pool, ms | of the dict's time |",
        "| --- " * 6 + "|",
    ]
    for kind in dict.fromkeys(kind for _, kind, _ in figures):
        line = f"| {kind} | {figures['batch_types/mb', kind, 'local']['median']:.2f} |"
        for way in WAYS:
            ratio = figures["batch_types/ratio", kind, way]
            line += f" {figures['batch_types/ms', kind, way]['median']:.2f} |"
            line += f" {ratio['median']:.2f} ({ratio['p10']:.2f} to {ratio['p90']:.2f}) |"
        lines.append(line)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=int, default=7)
    add("--batches", type=int, default=40, help="timed batches of a measurement")
    add("--warmup-batches", type=int, default=10)
    add("--mib", type=float, default=18.0, help="size of the dict's batches")
    add("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="beside the dict")
    add("--quick", action="store_true", help="smoke test: one short round of small batches")
    add_report_options(parser)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.batches, args.warmup_batches, args.mib = 1, 4, 2, 0.5
    return 2 if report("batch_types", args, measure_all, table) is None else 0


if __name__ == "__main__":
    sys.exit(main())
