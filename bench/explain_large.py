# SPDX-License-Identifier: Apache-2.0
"""The time and the memory of penstock.explain for large models without values.

Each model is a decoder of patches and tokens in bfloat16, built on the meta device in a fresh
process, which explains it once. "peak" is the most resident memory of that process at any time,
imports included; "import" is the same before the model is built. With --real a model of a billion
parameters is also built with values, and both plans must be the same.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

import torch
import torch.nn.functional as F
from figures import MeasurementError, Record, add_report_options, log, report, run_main, summary
from table import aligned
from torch import nn

import penstock

SECONDS_MAX = 900
HEAD_WIDTH = 128
PATCH = 14
# Blocks and width: 1.1, 13 and 66 billion parameters.
SIZES = ((20, 2048), (40, 5120), (65, 9216))
REAL_CASES = ((*SIZES[0], "meta"), (*SIZES[0], "cpu"))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        parts = self.query_key_value(self.before_attention(x)).chunk(3, dim=-1)
        heads = [part.view(rows, length, -1, HEAD_WIDTH).transpose(1, 2) for part in parts]
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, self.width))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class Decoder(nn.Module):
    """Normalises and unfolds images into patches, in front of its tokens; the head is tied."""

    def __init__(self, depth: int, width: int, vocabulary: int = 32_000) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.patches = nn.Linear(3 * PATCH * PATCH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))

    def forward(self, ids: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        normalised = (pixels.float() / 255 - self.mean) / self.std
        patches = F.unfold(normalised, PATCH, stride=PATCH).transpose(1, 2)
        dtype = self.patches.weight.dtype
        x = torch.cat([self.patches(patches.to(dtype)), self.tokens(ids)], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def decoder(depth: int, width: int, device: str) -> Decoder:
    """In bfloat16; its parameters on `device`, and the buffers of its images always with values."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Decoder(depth, width)
    finally:
        torch.set_default_dtype(former)
    model.mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    model.std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    return model


def images_and_text() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of two."""
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 32_000, (2, 64), generator=draws)
    return ids, torch.randint(0, 256, (2, 3, 56, 56), dtype=torch.uint8, generator=draws)


def facts(plan: penstock.Plan) -> dict[str, Any]:
    """All of a plan but its times, which depend on the moment, in the form that JSON gives back."""
    calls = [
        [call.index, call.operator, call.place, call.reason, call.made_bytes, call.device]
        for call in (*plan.moved, *plan.kept)
    ]
    edges = [list(astuple(edge)) for edge in plan.edges]
    sizes = [plan.raw_bytes, plan.maximal_bytes, plan.boundary_bytes]
    return {"refused": plan.refused, "calls": calls, "edges": edges, "bytes": sizes}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def explain_once(depth: int, width: int, device: str) -> dict[str, Any]:
    """In this process, which should be a fresh one."""
    before = peak_bytes()
    batch = images_and_text()
    start, start_cpu = time.perf_counter(), time.process_time()
    model = decoder(depth, width, device)
    built, built_cpu = time.perf_counter(), time.process_time()
    plan = penstock.explain(model, batch, cut="maximal")
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": time.perf_counter() - built,
        "cpu_seconds": time.process_time() - built_cpu,
        "build_seconds": built - start,
        "build_cpu_seconds": built_cpu - start_cpu,
        "import_bytes": before,
        "peak_bytes": peak_bytes(),
        "plan": facts(plan),
    }


def in_fresh_process(depth: int, width: int, device: str) -> dict[str, Any]:
    log(f"{depth} blocks of width {width} on {device}")
    command = [sys.executable, __file__, "--once", str(depth), str(width), device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
    if done.returncode:
        raise MeasurementError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if found["plan"]["refused"] is not None:
        raise MeasurementError(found["plan"]["refused"])
    return found


def measure(args: argparse.Namespace) -> Iterator[Record]:
    plans: dict[tuple[int, int], list[dict[str, Any]]] = {}
    cases = [(*size, "meta") for size in args.sizes]
    if args.real:
        cases += [case for case in REAL_CASES if case not in cases]
    for depth, width, device in cases:
        runs = [in_fresh_process(depth, width, device) for _ in range(args.rounds)]
        plans.setdefault((depth, width), []).extend(run["plan"] for run in runs)
        moved = sum(call[2] == "worker" for call in runs[0]["plan"]["calls"])
        parameters = {
            "parameters": runs[0]["parameters"],
            "blocks": depth,
            "width": width,
            "device": device,
            "calls": len(runs[0]["plan"]["calls"]),
            "moved": moved,
        }
        for figure in ("seconds", "cpu_seconds", "import_bytes", "peak_bytes"):
            yield summary(f"explain_large/{figure}", parameters, [run[figure] for run in runs])
    for size, found in plans.items():
        if any(plan != found[0] for plan in found):
            raise MeasurementError(f"plans of one model of size {size} differ")


def table(everything: list[Record]) -> str:
    rows = [["parameters, 10^9", "values", "calls", "that move", "s", "CPU s", "peak, MiB"]]
    found = {(r["name"], json.dumps(r["parameters"])): r["median"] for r in everything}
    for name, parameters in found:
        if name != "explain_large/seconds":
            continue
        case = json.loads(parameters)
        rows.append(
            [
                f"{case['parameters'] / 1e9:.1f}",
                "none (meta)" if case["device"] == "meta" else "on the CPU",
                str(case["calls"]),
                str(case["moved"]),
                f"{found[name, parameters]:.1f}",
                f"{found['explain_large/cpu_seconds', parameters]:.1f}",
                f"{found['explain_large/peak_bytes', parameters] / 2**20:,.0f}",
            ]
        )
    return aligned(rows)


def size(text: str) -> tuple[int, int]:
    depth, _, width = text.partition("x")
    return int(depth), int(width)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="processes for each model (default: 3)")
    add("--sizes", type=size, nargs="+", default=list(SIZES), metavar="BLOCKSxWIDTH")
    add("--real", action="store_true", help="compare with a model that has values")
    add("--once", nargs=3, metavar=("BLOCKS", "WIDTH", "DEVICE"), help="explain in this process")
    add_report_options(parser)
    args = parser.parse_args()
    if args.once is not None:
        depth, width, device = args.once
        print(json.dumps(explain_once(int(depth), int(width), device)))
        return 0
    return 2 if report("explain_large", args, measure, table) is None else 0


if __name__ == "__main__":
    run_main(main)
