# SPDX-License-Identifier: Apache-2.0
"""Trains a random model with and without a cut, and compares all of the visible results."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from in_process_pool import InProcessPool, clone
from random_models import LEAVES, Program
from torch import nn

from penstock.cut.offloading import detach, offload

# Reasons that are always wrong here: an unexpected exception, or a worker whose result differs from
# the trainer's on the same thread of the same machine.
FAULTS = ("planning failed", "the cut failed", "the workers' result")
OPERATOR = re.compile(r" = (\w+::\w+)")

Trace = list[tuple[str, Any]]


class EagerRefused(Exception):
    """The program cannot be trained at all."""


@dataclass
class Outcome:
    """The outcome of one program."""

    moved: set[str] = field(default_factory=set)  # ATen operators that workers ran
    staying: set[str] = field(default_factory=set)  # calls that only the trainer runs
    refused: str | None = None
    shipped_count: int = 0


def check(program: Program) -> Outcome:
    """Compare training with a cut to training without; raise AssertionError with the program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = program.batches()
        try:
            expected = train(program, program.make_model(), [clone(batch) for batch in batches])
        except Exception as error:
            raise EagerRefused(str(error)) from error
        return _compare(program, batches, expected)


def _compare(program: Program, batches: Sequence[Any], expected: Trace) -> Outcome:
    pool = InProcessPool(batches)
    with captured_warnings() as warned:
        model = offload(program.make_model(), pool, cut="maximal")
        try:
            got = train(program, model, pool)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}\n\n{program}") from error
        plan, prefixes = pool.plan, list(pool.prefixes)
        detach(model)
    difference = first_difference(expected, got)
    if difference is not None and not is_repeatable(program, batches, expected):
        raise EagerRefused("eager gives other bits each time")
    assert difference is None, f"{difference}\n\n{program}"
    reasons = [re.sub("no call of .* moves to the workers: ", "", text) for text in warned]
    for reason in reasons:
        assert not reason.startswith(FAULTS), f"{reason}\n\n{program}"
    moved = {name for text in prefixes for name in OPERATOR.findall(text)}
    kept = plan.kept if plan is not None else ()
    staying = {call.operator for call in kept if call.place == "trainer"}
    return Outcome(moved, staying, "; ".join(reasons) or None, pool.shipped_count)


def smallest_that_differs(program: Program) -> Program:
    """Return the smallest part of a program that still differs from eager mode."""
    while True:
        count = len(program.lines)
        candidates = [
            replace(program, lines=(*program.lines[:i], *program.lines[i + 1 :]))
            for i in reversed(range(count))
        ]
        candidates += [
            replace(program, extras=(*program.extras[:i], *program.extras[i + 1 :]))
            for i in range(len(program.extras))
        ]
        candidates += [
            replace(program, features=(feature,))
            for feature in (*program.features, "x")
            if program.features not in ((feature,), ("x",))
        ]
        smaller = next((candidate for candidate in candidates if differs(candidate)), None)
        if smaller is None:
            return program
        program = smaller


def differs(program: Program) -> bool:
    try:
        check(program)
    except EagerRefused:
        return False
    except AssertionError:
        return True
    return False


def is_repeatable(program: Program, batches: Sequence[Any], expected: Trace) -> bool:
    """Return whether eager mode repeats its results with different surrounding memory."""
    kept: list[torch.Tensor] = []
    for k in range(8):
        kept += [torch.empty(3 * k + 1), torch.empty(17)]
        again = train(program, program.make_model(), [clone(batch) for batch in batches])
        if again != expected:
            return False
    return True


@contextlib.contextmanager
def captured_warnings() -> Iterator[list[str]]:
    """Yield the list of penstock's warnings during the block."""
    texts: list[str] = []

    class ListHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage().removeprefix("penstock: "))

    logger, handler = logging.getLogger("penstock"), ListHandler(logging.WARNING)
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def train(program: Program, model: nn.Module, batches: Any) -> Trace:
    """Train with momentum; return all visible values after each call and step, with labels."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1234)
    trace: Trace = []
    for step, batch in enumerate(batches):
        if program.evaluates:
            model.train(step % 2 == 0)
        if program.changes_buffer and step == 2:
            with torch.no_grad():
                model.scale.add_(0.125)
        optimizer.zero_grad()
        for call in range(program.calls):
            where = f"step {step}, call {call}: "
            given = (batch,) if program.takes == "a dict" else [batch[leaf] for leaf in LEAVES]
            logits, extras = model(*given)
            loss = logits.square().mean()
            loss.backward()
            trace.append((where + "loss", bits(loss)))
            trace += [(where + f"extra {i}", look(t)) for i, t in enumerate(extras)]
            if program.overwrites_results:
                trace += [(where + f"writing {i}", overwrite(t)) for i, t in enumerate(extras)]
                trace += [(where + f"extra {i} then", look(t)) for i, t in enumerate(extras)]
            trace += [(where + f"batch {name}", look(t)) for name, t in batch.items()]
        where = f"step {step}: "
        trace += [
            (where + f"gradient of {name}", None if p.grad is None else bits(p.grad))
            for name, p in model.named_parameters()
        ]
        optimizer.step()
        trace += [(where + name, bits(value)) for name, value in model.state_dict().items()]
        trace.append((where + "generator", bits(torch.get_rng_state())))
    return trace


def look(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a tensor's properties, as a program sees them."""
    return (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.requires_grad,
        bits(tensor),
    )


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


def overwrite(tensor: torch.Tensor) -> str | None:
    """Write to a result of the model, as a program may; return the error if this is not allowed."""
    try:
        with torch.no_grad():
            tensor.fill_(1)
    except RuntimeError as error:
        return type(error).__name__
    return None


def first_difference(expected: Trace, got: Trace) -> str | None:
    for (label, theirs), (ours_label, ours) in zip(expected, got, strict=True):
        assert label == ours_label
        if theirs != ours:
            return f"{label} differs from eager's:\n  eager {theirs!r:.300}\n  ours  {ours!r:.300}"
    return None
