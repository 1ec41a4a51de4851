# SPDX-License-Identifier: Apache-2.0
"""Random models: programs over `operator_table`, made by running each line as it is added.

A line that fails in eager mode is left out, so nearly every program can be trained. The caller's
`choose` makes the choices: hypothesis, a seeded generator, or always the first option.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from operator_table import FAMILIES, Operator
from torch import nn

Choose = Callable[[Sequence[Any]], Any]

CHOICE = re.compile(r"<<(.*?)>>")
NUMBERS_MAX = 4096  # of a value: a program that multiplies its sizes is slow and tests no more
LINES_MAX = 16

LEAVES = ("photo", "image", "x", "series", "wide", "ids", "small", "mask", "tone")
CONSTANTS = ("self.scale", "self.table", "self.square", "self.shift", "self.order")
COUNTED = ("self.running", "self.steps")
PARAMETERS = ("self.gain", "self.weight")

# The places in which an operand is searched first. Mostly among values that may move.
PLACES = ("values",) * 8 + ("leaves",) * 5 + ("constants", "counted", "parameters")
WRITTEN_PLACES = ("values",) * 15 + ("leaves",)


def make_batch(rows: int, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "photo": torch.randn(rows, 3, 6, 5, generator=g),
        "image": torch.randint(0, 256, (rows, 3, 6, 5), dtype=torch.uint8, generator=g),
        "x": torch.randn(rows, 8, generator=g),
        "series": torch.randn(rows, 2, 8, generator=g),
        "wide": torch.randn(rows, 8, dtype=torch.float64, generator=g),
        "ids": torch.randint(0, 8, (rows, 8), generator=g),
        "small": torch.randint(-4, 5, (rows, 4), dtype=torch.int32, generator=g),
        "mask": torch.rand(rows, 8, generator=g) > 0.5,
        "tone": torch.randn(rows, 8, dtype=torch.complex64, generator=g),
    }


class RandomModel(nn.Module):
    """The attributes of `self` that random programs use."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.randn(8))
        self.register_buffer("table", torch.randn(8, 4))
        self.register_buffer("square", torch.randn(8, 8))
        self.register_buffer("order", torch.randperm(8))
        self.register_buffer("running", torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.shift = torch.randn(8)
        self.gain = nn.Parameter(torch.randn(8))
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.linear = nn.Linear(8, 8)
        self.embed = nn.Embedding(8, 8)
        self.conv = nn.Conv2d(3, 3, 3)
        self.batch_norm = nn.BatchNorm1d(8)
        self.layer_norm = nn.LayerNorm(8)
        self.head = nn.Linear(16, 3)

    def logits(self, *values: torch.Tensor) -> torch.Tensor:
        """Return a trainable output, from any values."""
        rows = []
        for value in values:
            if value.is_complex():
                value = torch.view_as_real(value.resolve_conj())
            row = value.reshape(-1).to(torch.float32)
            rows.append(torch.cat([row, torch.zeros(16)])[:16])
        features = torch.nan_to_num(torch.stack(rows), 0.5, 4.0, -4.0).clamp(-4.0, 4.0)
        return self.head(features)


@dataclass(frozen=True)
class Program:
    """A model's forward, line by line, and its training options."""

    lines: tuple[str, ...]
    features: tuple[str, ...]  # the values that the loss is computed from
    extras: tuple[str, ...] = ()  # further values that the model returns
    takes: str = "a dict"  # or "tensors"
    rows: tuple[int, ...] = (4, 4, 4)  # of each step's batch
    calls: int = 1  # of the model with each batch
    evaluates: bool = False  # every other step is in eval mode
    overwrites_results: bool = False  # the loop writes to the model's results
    changes_buffer: bool = False  # the loop changes a buffer halfway

    @property
    def body(self) -> str:
        used = set(re.findall(r"[a-z_]\w*", "\n".join([*self.lines, *self.features, *self.extras])))
        leaves = [leaf for leaf in LEAVES if leaf in used] or ["x"]
        if self.takes == "a dict":
            lines = ["def forward(self, batch):"]
            lines += [f'    {leaf} = batch["{leaf}"]' for leaf in leaves]
        else:
            lines = [f"def forward(self, {', '.join(LEAVES)}):"]
        lines += [f"    {line}" for entry in self.lines for line in entry.splitlines()]
        lines.append(f"    logits = self.logits({', '.join(self.features)})")
        extras = "".join(f"{extra}, " for extra in self.extras)
        return "\n".join([*lines, f"    return logits, ({extras})"])

    def place_of(self, line: str) -> str:
        """Return the location of a line's calls in a plan."""
        return f"{self._file_name}:{self.body.splitlines().index('    ' + line) + 1}"

    @property
    def _file_name(self) -> str:
        return f"<random model {zlib.crc32(self.body.encode()):08x}>"

    def make_model(self) -> nn.Module:
        namespace: dict[str, Any] = {"torch": torch, "F": F}
        name, source = self._file_name, self.body + "\n"
        # Python finds the lines of a call there, and so does the plan that names it.
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        exec(compile(source, name, "exec"), namespace)
        torch.manual_seed(7)
        return type("Random", (RandomModel,), {"forward": namespace["forward"]})()

    def batches(self) -> list[dict[str, torch.Tensor]]:
        return [make_batch(rows, seed) for seed, rows in enumerate(self.rows)]

    def __str__(self) -> str:
        """Return a script that checks the program again; to be run with tests/python on the
        path."""
        settings = {
            name: value
            for name, value in vars(self).items()
            if name not in ("lines", "features", "extras")
        }
        lines = "".join(f"        {line!r},\n" for line in self.lines)
        rest = "".join(f", {name}={value!r}" for name, value in settings.items())
        return (
            "import torch\nfrom random_models import Program\nfrom random_training import check\n\n"
            f"torch.set_num_threads(1)\ncheck(Program(\n    lines=(\n{lines}    ),\n"
            f"    features={self.features!r}, extras={self.extras!r}{rest},\n))\n\n{self.body}\n"
        )


def make_program(choose: Choose, line_count: int, families: Sequence[str] = ()) -> Program:
    """Return a program of at most `line_count` lines that runs in eager mode."""
    sketch = Sketch()
    for _ in range(line_count):
        family = choose(families or tuple(FAMILIES))
        sketch.try_add(choose(FAMILIES[family]), choose)
    made = sketch.values_made() or ["x"]
    last = made[-1]
    return Program(
        lines=tuple(sketch.lines),
        features=tuple(dict.fromkeys([last, *(choose(made) for _ in range(choose((0, 1, 2))))])),
        extras=tuple(choose([*made, "x", "photo"]) for _ in range(choose((0, 1, 2, 3)))),
        takes=choose(("a dict", "tensors")),
        rows=choose(((4, 4, 4),) * 6 + ((4, 4, 3, 3, 3), (4, 3, 5, 5, 4, 4))),
        calls=choose((1, 1, 1, 2)),
        evaluates=choose((False, False, False, True)),
        overwrites_results=choose((False, True)),
        changes_buffer=choose((False, False, False, False, True)),
    )


class Sketch:
    """A program under construction, and its values on one batch."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        torch.manual_seed(7)
        self._globals = {"torch": torch, "F": F}
        self._locals: dict[str, Any] = {"self": RandomModel(), **make_batch(4, 0)}
        self._made: list[str] = []

    def values_made(self) -> list[str]:
        return list(self._made)

    def try_add(self, operator: Operator, choose: Choose) -> bool:
        """Add a line with operands and options chosen by `choose`; return False if none runs."""
        operands: list[str] = []
        for kind in operator.operands:
            names = self._candidates(kind, operands, operator.writes and not operands, choose)
            if not names:
                return False
            operands.append(choose(names))
        line = CHOICE.sub(lambda found: choose(found[1].split("|")), operator.template)
        line = line.lstrip("!").format(*operands)
        if operator.writes:
            return self._try_run(line)
        return self._try_assign(line, wrapped=choose((False,) * 15 + (True,)))

    def _try_run(self, line: str) -> bool:
        line = line.replace("\n", " ")
        if not self._runs(line):
            return False
        self.lines.append(line)
        return True

    def _try_assign(self, line: str, wrapped: bool) -> bool:
        if not self._runs(f"result = {line}"):
            return False
        result = self._locals.pop("result")
        results = [result] if isinstance(result, torch.Tensor) else result
        if not isinstance(results, (list, tuple)) or not 0 < len(results) <= 8:
            return False
        if not all(isinstance(t, torch.Tensor) and t.numel() <= NUMBERS_MAX for t in results):
            return False
        count = len(self._made)
        names = [f"v{count + i}" for i in range(len(results))]
        self._locals.update(zip(names, results, strict=True))
        self._made += names
        targets = names[0] if result is results[0] else f"({', '.join(names)},)"
        assignment = f"{targets} = {line}"
        self.lines.append(f"with torch.no_grad():\n    {assignment}" if wrapped else assignment)
        return True

    def _runs(self, line: str) -> bool:
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")
            exec(line, self._globals, self._locals)
            return True
        return False

    def _candidates(
        self, kind: str, before: Sequence[str], is_written: bool, choose: Choose
    ) -> list[str]:
        """Return names of values that fit `kind`, from one of the places that contain values."""
        relation, kind = ("~", kind[1:]) if kind.startswith("~") else ("", kind)
        place = choose(WRITTEN_PLACES if is_written else PLACES)
        pools = {
            "values": self._made,
            "leaves": LEAVES,
            "constants": CONSTANTS,
            "counted": COUNTED,
            "parameters": PARAMETERS,
        }
        others = () if is_written else ("leaves", "constants")
        for pool in (place, *others):
            names = [name for name in pools[pool] if fits(self._value(name), kind)]
            if relation:
                shape = self._value(before[0]).shape
                names = [n for n in names if broadcasts(self._value(n).shape, shape)]
            if names:
                return names
        return [before[0]] if relation else []

    def _value(self, name: str) -> torch.Tensor:
        if name.startswith("self."):
            return getattr(self._locals["self"], name.removeprefix("self."))
        return self._locals[name]


def fits(tensor: torch.Tensor, kind: str) -> bool:
    dtype, dims = kind[0], kind[1:]
    if dims.endswith("+"):
        if tensor.dim() < int(dims[:-1]):
            return False
    elif dims and tensor.dim() != int(dims):
        return False
    if tensor.numel() == 0:
        return False
    is_float, is_bool = tensor.is_floating_point(), tensor.dtype == torch.bool
    return {
        "F": is_float,
        "E": tensor.dtype == torch.float32 and tensor.shape[-1:] == (8,),
        "G": tensor.dtype == torch.float32 and tensor.shape[1:2] == (3,),
        "I": not is_float and not is_bool and not tensor.is_complex(),
        "B": is_bool,
        "N": not is_bool and not tensor.is_complex(),
        "C": tensor.is_complex(),
    }[dtype]


def broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    """Return whether a tensor of `shape` broadcasts to `to` without enlarging it."""
    return len(shape) <= len(to) and all(
        a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False)
    )
