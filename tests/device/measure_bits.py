#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures for which operators a CPU gives the same bits as a device, and writes the table.

usage: python tests/device/measure_bits.py [--device cuda] [--out FILE]

Every operator below autograd that a sample of torch's OpInfo runs, or one of the calls here, is run
on the device and, on copies of its inputs, on the CPU. A form (csrc/graph/device_bits.h) is equal
if all of its calls gave the same bits; payloads of NaN are not compared. Random operators and
operators without a tensor result are left out. A division by a number is tried as a product with
the reciprocal, too.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from penstock import _C
from penstock.graph.emission import dtype_name, literal
from penstock.graph.operators import operator_name, with_numbers
from penstock.graph.sizes import Unlowerable

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
OF_DEVICES = ("device", "non_blocking", "pin_memory")
# The number of elements in the calls listed here: kernels take other paths for few.
ELEMENTS = 1 << 20


class BitsMeter(TorchDispatchMode):
    """Compares each operator on a device with the CPU's."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = torch.device(device)
        self.equal: Counter[str] = Counter()
        self.differing: Counter[str] = Counter()
        self.reciprocal: Counter[str] = Counter()
        self.not_reciprocal: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_map(_to_cpu, (args, kwargs))
        result = func(*args, **kwargs)
        if self._is_measured(func, args, kwargs, result):
            form = form_of(func, args, kwargs)
            if form is not None:
                self._compare(form, func, given, result)
        return result

    def _is_measured(self, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
        schema = func._schema
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        return (
            func.namespace == "aten"
            and not schema.is_mutable
            and torch.Tag.nondeterministic_seeded not in func.tags
            and bool(tensors)
            and all(one.device.type == self.device.type for one in tensors)
            and any(isinstance(one, torch.Tensor) for one in tree_leaves(result))
        )

    def _compare(self, form: str, func: Any, given: Any, result: Any) -> None:
        args, kwargs = given
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        try:
            expected = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            self.differing[form] += 1  # the CPU has no kernel for it
            return
        is_equal = _are_same(expected, result)
        (self.equal if is_equal else self.differing)[form] += 1
        if form.startswith("div.Scalar(") and not kwargs:
            inverse = torch.tensor(1.0) / torch.tensor(float(args[1]))
            product = args[0] * inverse.item()
            if _are_same(product, result):
                self.reciprocal[form] += 1
            else:
                self.not_reciprocal.add(form)

    def table(self, measured_on: str) -> str:
        lines = [
            "penstock-device-bits 1",
            f"device {self.device.type}",
            f'measured "{measured_on}"',
        ]
        equal = set(self.equal) - set(self.differing)
        twins = {
            form
            for form in self.reciprocal
            if form not in self.not_reciprocal and form not in equal
        }
        lines += [f"equal {form}" for form in sorted(equal)]
        lines += [f"reciprocal {form}" for form in sorted(twins)]
        lines += [f"differs {form}" for form in sorted(set(self.differing) - twins)]
        return "\n".join(lines) + "\n"


def form_of(func: Any, args: Sequence[Any], kwargs: Any) -> str | None:
    """The form of a call, as the analysis writes it; None for arguments that have none."""
    dtypes: list[str] = []

    def argument(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            dtypes.append(dtype_name(value.dtype))
            return f"%x{len(dtypes) - 1}"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(argument, value))}]"
        return literal(value)

    try:
        target = operator_name(with_numbers(func, list(args)))
        parts = [argument(value) for value in args]
        parts += [f"{k}={argument(v)}" for k, v in kwargs.items() if k not in OF_DEVICES]
    except Unlowerable:
        return None
    inputs = "".join(f"input %x{i} leaf {i} {dtype} []\n" for i, dtype in enumerate(dtypes))
    names = [f"%y{i}" for i in range(len(func._schema.returns))]
    call = f"{', '.join(names)} = {target}({', '.join(parts)}) on cuda [{', '.join(dtypes)}]"
    forms: list[str] = _C.parse_graph(f"penstock-ir 1\n{inputs}{call}\n").bits_forms
    return forms[0]


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _are_same(expected: Any, result: Any) -> bool:
    ours, theirs = (
        [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]
        for value in (expected, result)
    )
    return len(ours) == len(theirs) and all(map(_is_same, ours, theirs))


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    b = b.cpu()
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if a.is_complex():
        return _is_same(torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj()))
    if a.is_floating_point():
        if not torch.equal(a.isnan(), b.isnan()):
            return False
        a, b = a.nan_to_num(), b.nan_to_num()
    a, b = (one.resolve_neg().contiguous().reshape(-1).view(torch.uint8) for one in (a, b))
    return torch.equal(a, b)


# ---- Calls to run


def own_calls(device: str, elements: int = ELEMENTS) -> Iterator[Any]:
    """Calls with which programs prepare batches, on many numbers with every kind among them."""
    generator = torch.Generator().manual_seed(1)
    for dtype in FLOATS:
        x = torch.randn(elements, generator=generator).mul(30).to(dtype)
        x[:4] = torch.tensor([float("inf"), -float("inf"), float("nan"), 1e-42]).to(dtype)
        y = torch.randn(elements, generator=generator).to(dtype).to(device)
        x = x.to(device)
        for number in (255, 255.0, 0.5, 3, 1e-3):
            yield lambda x=x, n=number: (x / n, x * n, x + n, x - n, n - x, x.clamp(max=n), x > n)
        yield lambda x=x, y=y: (x / y, x * y, x + y, x - y, x.maximum(y), torch.where(x > y, x, y))
        yield lambda x=x: (x.abs(), x.neg(), x.floor(), x.round(), x.frac(), x.sign(), x.square())
        for function in (torch.exp, torch.log, torch.sqrt, torch.sin, torch.tanh, torch.sigmoid):
            yield lambda x=x, f=function: f(x)
        images = torch.rand(4, 3, 65, 67, generator=generator).to(dtype).to(device)
        for size, (mode, options) in itertools.product(((32, 32), (97, 101)), _MODES):
            yield lambda i=images, s=size, m=mode, o=options: F.interpolate(i, s, mode=m, **o)
        for to in (*FLOATS, *INTEGERS, torch.bool):
            yield lambda x=y, t=to: x.abs().clamp(max=100).to(t)
    for dtype in INTEGERS:
        x = torch.randint(0, 120, (elements,), generator=generator).to(dtype).to(device)
        for to in (*FLOATS, *INTEGERS, torch.bool):
            yield lambda x=x, t=to: x.to(t)
        yield lambda x=x: (x / 255, x / 3.0, x * 3, x + 7, x % 11, x // 5, x.float() / 255, x == 3)
        yield lambda x=x: (
            x.flip(0),
            x.roll(3),
            torch.cat([x, x]),
            F.pad(x, (1, 2)),
            x.long()[x.long()],
        )
        yield lambda x=x: F.one_hot(x.long()[:1000], 120)


_MODES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("nearest", {}),
    ("nearest-exact", {}),
    ("bilinear", {"align_corners": False}),
    ("bilinear", {"antialias": True}),
    ("bicubic", {"antialias": True}),
    ("area", {}),
)


def samples_of_opinfo(device: str) -> Iterator[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        for dtype in (*FLOATS, torch.uint8, torch.int64, torch.bool):
            if dtype not in info.dtypes:
                continue
            try:
                samples = list(info.sample_inputs(device, dtype, requires_grad=False))
            except Exception:
                continue  # has no samples for this device
            for sample in samples:
                yield lambda f=info.op, s=sample: f(s.input, *s.args, **s.kwargs)


def measure(device: str, calls: Iterator[Any]) -> BitsMeter:
    meter = BitsMeter(device)
    for call in calls:
        try:
            with torch.no_grad(), meter:
                call()
        except Exception as error:
            print(
                f"left out: {type(error).__name__}: {str(error).splitlines()[:1]}", file=sys.stderr
            )
    return meter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    calls = itertools.chain(own_calls(options.device), samples_of_opinfo(options.device))
    meter = measure(options.device, calls)
    name = torch.get_device_module(options.device).get_device_name(0)
    cpu = torch.backends.cpu.get_cpu_capability()
    table = meter.table(f"{name} against a CPU with {cpu}, torch {torch.__version__}")
    if options.out is None:
        print(table, end="")
    else:
        options.out.write_text(table)
    print(
        f"{len(meter.equal)} forms with equal calls, {len(meter.differing)} with others, "
        f"{time.monotonic() - began:.0f} s",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
