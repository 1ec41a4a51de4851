# SPDX-License-Identifier: Apache-2.0
"""A lowered graph computes the very bits that eager computes, and moves when it may."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from penstock import _C
from penstock.errors import PenstockError
from penstock.graph.capture import Captured, GraphInput, capture_whole
from penstock.graph.emission import emit
from penstock.graph.lowering import Lowering, lower
from penstock.graph.planning import CutOptions, PlannedCut, plan_cut
from penstock.graph.sizes import Unlowerable

MAXIMAL = CutOptions("maximal", allow_random=False, worker_count=1)


def capture(fn: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Captured, list[GraphInput]]:
    captured = capture_whole(fn, inputs, {})
    place = {id(tensor): index for index, tensor in enumerate(inputs)}
    return captured, [
        GraphInput("leaf", p.label, place[id(value)])
        if id(value) in place
        else GraphInput("state", p.label)
        for p, value in zip(captured.placeholders, captured.examples, strict=True)
    ]


def lowered(fn: Callable[..., Any], *inputs: torch.Tensor) -> tuple[str, Lowering]:
    captured, graph_inputs = capture(fn, *inputs)
    lowering = lower(captured.graph_module, graph_inputs, captured.examples)
    return emit(lowering, captured.examples).text, lowering


def cut(
    fn: Callable[..., Any], *inputs: torch.Tensor, dims: Sequence[int] = ()
) -> tuple[PlannedCut, Lowering]:
    """The maximal cut of `fn`; dimensions in `dims` of every input are symbolic."""
    captured, graph_inputs = capture(fn, *inputs)
    graph_inputs = [
        GraphInput(i.kind, i.label, i.leaf_index, tuple(dims) if i.kind == "leaf" else ())
        for i in graph_inputs
    ]
    lowering, planned = plan_cut(
        lambda symbolic: lower(
            captured.graph_module, graph_inputs, captured.examples, symbolic=symbolic
        ),
        captured.examples,
        len(inputs),
        MAXIMAL,
    )
    return planned, lowering


def run_prefix(planned: PlannedCut, *leaves: torch.Tensor) -> dict[str, torch.Tensor]:
    executor = _C.Executor(_C.parse_graph(planned.prefix), list(planned.prefix_constants))
    results = executor.run(list(leaves))
    return {str(b.name): r for b, r in zip(planned.boundary, results, strict=True)}


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    assert torch.equal(*flat)


IMAGE = torch.randint(0, 256, (4, 3, 12, 10), dtype=torch.uint8)
FLOATS = torch.randn(6, 8)
IDS = torch.randint(0, 20, (6, 8))
WAVE = torch.randn(3, 256)

# Common operations in front of models. Everything here must move, completely.
MOVABLE: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "scale": (lambda x: x / 255.0, (IMAGE,)),
    "to float": (lambda x: x.to(torch.float32) - 0.5, (IMAGE,)),
    "to half": (lambda x: x.half(), (FLOATS,)),
    "channels last": (lambda x: x.float().contiguous(memory_format=torch.channels_last), (IMAGE,)),
    "permute": (lambda x: x.permute(0, 2, 3, 1).float(), (IMAGE,)),
    "resize antialias": (
        lambda x: F.interpolate(x.float(), size=(7, 5), mode="bilinear", antialias=True),
        (IMAGE,),
    ),
    "resize nearest": (lambda x: F.interpolate(x.float(), scale_factor=2.0), (IMAGE,)),
    "resize bicubic": (
        lambda x: F.interpolate(x.float(), size=9, mode="bicubic", align_corners=True),
        (IMAGE,),
    ),
    "resize by factor": (
        lambda x: F.interpolate(
            x.float(), scale_factor=(0.5, 1.5), mode="bilinear", recompute_scale_factor=True
        ),
        (IMAGE,),
    ),
    "crop and flip": (lambda x: x[:, :, 2:-2, 1:9].flip(-1).float(), (IMAGE,)),
    "pad": (lambda x: F.pad(x.float(), (1, 2, 3, 4), mode="reflect"), (IMAGE,)),
    "pool": (lambda x: F.avg_pool2d(x.float(), 2), (IMAGE,)),
    "grayscale": (
        lambda x: (x.float() * torch.tensor([0.3, 0.6, 0.1]).view(3, 1, 1)).sum(1),
        (IMAGE,),
    ),
    "log1p clamp": (lambda x: torch.log1p(x.clamp(min=0.0, max=3.0)), (FLOATS,)),
    "standardize": (lambda x: (x - x.mean(0)) / (x.std(0) + 1e-6), (FLOATS,)),
    "bucketize": (lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])), (FLOATS,)),
    "one hot": (lambda x: F.one_hot(x, 20).float(), (IDS,)),
    "cross": (lambda x: (x[:, 0] * 31 + x[:, 1]) % 17, (IDS,)),
    "where nan": (lambda x: torch.where(x > 0, x, torch.nan).nan_to_num(0.25), (FLOATS,)),
    "split": (lambda x: torch.cat([p.sin() for p in x.split(3, 1)], 1), (FLOATS,)),
    "unbind": (lambda x: torch.stack(x.unbind(1)[::2]), (FLOATS,)),
    "chunk of several": (lambda x: [c * 2 for c in x.chunk(4, 1)], (FLOATS,)),
    "max with indices": (lambda x: x.max(1), (FLOATS,)),
    "topk": (lambda x: x.topk(3, dim=1).values, (FLOATS,)),
    "sort": (lambda x: torch.sort(x, 1, descending=True)[1], (FLOATS,)),
    "cumsum": (lambda x: x.cumsum(1), (FLOATS,)),
    "gather": (lambda x, i: x.gather(1, i % 8), (FLOATS, IDS)),
    "index by list": (lambda x: x[:, [0, 3, 5]], (FLOATS,)),
    "index by tensor": (lambda x, i: x[i[:, 0] % 6], (FLOATS, IDS)),
    "mask": (lambda x: x.masked_fill(x < 0, 0.0), (FLOATS,)),
    "attention mask": (
        lambda m: (
            (1.0 - (m > 4)[:, None, None, :].to(torch.float32)) * torch.finfo(torch.float32).min
        ),
        (IDS,),
    ),
    "causal mask": (
        lambda x: torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1) + x[:, None, :8],
        (FLOATS,),
    ),
    "positions": (lambda x: torch.arange(x.shape[1]).expand_as(x) + x, (IDS,)),
    "stft": (
        lambda x: torch.stft(x, 32, 8, window=torch.hann_window(32), return_complex=True).abs(),
        (WAVE,),
    ),
    "fft": (lambda x: torch.view_as_real(torch.fft.rfft(x)), (WAVE,)),
    "mel": (
        lambda x: torch.log(torch.matmul(x.unfold(1, 32, 16).square(), torch.ones(32, 5)) + 1e-6),
        (WAVE,),
    ),
    "normalize rows": (lambda x: F.normalize(x, dim=1), (FLOATS,)),
    "softmax": (lambda x: x.softmax(1), (FLOATS,)),
    "layer norm": (lambda x: F.layer_norm(x, (8,)), (FLOATS,)),
    "einsum": (lambda x: torch.einsum("ij,kj->ik", x, x), (FLOATS,)),
    "in-place clone": (lambda x: x.clone().sub_(1.0).div_(3.0).clamp_(0.0), (FLOATS,)),
    "in-place operators": (lambda x: plus_equals(x), (FLOATS,)),
    "in-place copy": (lambda x: torch.zeros_like(x).copy_(x.abs()), (FLOATS,)),
    "square in place": (lambda x: x.clone().square_(), (FLOATS,)),
    "relu in place": (lambda x: F.relu(x + 1.0, inplace=True), (FLOATS,)),
    "scatter": (lambda x: torch.zeros(6, 20).scatter_(1, x, 1.0), (IDS,)),
    "meshgrid": (
        lambda x: (
            x[:, 0]
            + torch.stack(torch.meshgrid(torch.arange(12), torch.arange(10), indexing="ij"))[0]
        ),
        (IMAGE,),
    ),
    "integers": (lambda x: (x // 3 + (x << 2) - (x & 7)).to(torch.int32), (IDS,)),
    "constant pad": (lambda x: F.pad(x.float(), (1, 2), value=1.0), (IMAGE,)),
    "whitening": (
        lambda x: torch.linalg.solve(torch.linalg.cholesky(x.t() @ x + torch.eye(8)), x.t()),
        (FLOATS,),
    ),
    "inverse": (lambda x: torch.linalg.inv(x.t() @ x + torch.eye(8)), (FLOATS,)),
    "singular values": (lambda x: torch.linalg.svdvals(x.reshape(2, -1, 4)), (FLOATS,)),
    "complex": (lambda x: torch.polar(x.abs(), x), (FLOATS,)),
    "double": (lambda x: (x.double() ** 2).sum(1).sqrt().float(), (FLOATS,)),
    "no grad inside": (lambda x: without_grad(x), (FLOATS,)),
}


def plus_equals(x: torch.Tensor) -> torch.Tensor:
    y = x * 2.0
    y += 1.0
    y *= x
    return y


@torch.no_grad()
def without_grad(x: torch.Tensor) -> torch.Tensor:
    return x.exp()


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", MOVABLE)
@pytest.mark.parametrize("dims", [(), (0,)], ids=["fixed", "any batch size"])
def test_common_preprocessing_moves_and_keeps_its_bits(name: str, dims: tuple[int, ...]) -> None:
    fn, inputs = MOVABLE[name]
    planned, lowering = cut(fn, *inputs, dims=dims)
    assert planned.plan.refused is None
    stays = [c for c in planned.plan.kept if c.place == "trainer"]
    assert [c.operator for c in stays if "set_grad_enabled" not in c.operator] == []
    batches = [inputs]
    if dims:
        batches.append(tuple(torch.cat([t, t.flip(0)[:3]]) for t in inputs))
    for batch in batches:
        if not lowering.conditions.hold(placed(lowering, batch)):
            continue
        made = run_prefix(planned, *batch)
        arguments = placed(lowering, batch)
        assert planned.suffix is not None
        ours = planned.suffix(*arguments, *made.values())
        theirs = flat(fn(*batch))
        assert len(flat(ours)) == len(theirs)
        for a, b in zip(flat(ours), theirs, strict=True):
            assert_same(a, b)


def placed(lowering: Lowering, batch: Sequence[torch.Tensor]) -> list[Any]:
    return [batch[item.leaf_index] for item in lowering.inputs]


def flat(value: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def test_chain_of_writes_to_a_clone_is_one_group() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        return x.clone().sub_(1.0).div_(3.0)

    line = f"test_lowering.py:{chain.__code__.co_firstlineno + 1}"
    unit = f'group 0 "clone, sub_, div_ at {line}" at "{line}"'
    text, _ = lowered(chain, FLOATS)
    assert text.splitlines()[2:5] == [
        f"%v1 = aten::clone(%x0) {unit}",
        f"%v2 = aten::sub.Scalar(%v1, 1.0) {unit}",
        f"%v3 = aten::div.Scalar(%v2, 3.0) {unit}",
    ]


def test_failing_operator_is_named_with_its_source_line() -> None:
    def look_up(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = x.clone()
        rows.mul_(2.0)
        rows = rows[ids]
        return rows.abs()

    first_line = look_up.__code__.co_firstlineno
    text, _ = lowered(look_up, FLOATS, IDS % 6)
    for line, operator in enumerate(("clone", "mul", "index", "abs"), start=first_line + 1):
        call = next(c for c in text.splitlines() if f"= aten::{operator}" in c)
        assert call.endswith(f' at "test_lowering.py:{line}"'), call
    planned, _ = cut(look_up, FLOATS, IDS % 6)
    with pytest.raises(
        PenstockError,
        match=rf"aten::index.Tensor .*test_lowering.py:{first_line + 3}.* failed on "
        r"\(float32 \[6, 8\], int64 \[6, 8\]\): index 19 is out of bounds",
    ):
        run_prefix(planned, FLOATS, torch.full_like(IDS, 19))


def test_source_lines_do_not_affect_keys() -> None:
    def keys(fn: Callable[..., Any]) -> list[str]:
        return [str(boundary.key) for boundary in cut(fn, FLOATS)[0].boundary]

    assert keys(lambda x: x.log1p() * 3.0) == keys(lambda x: x.log1p() * 3.0) != []


def write_leaf(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2.0) + 1.0


def write_view(x: torch.Tensor) -> torch.Tensor:
    y = x + 1.0
    y[0].zero_()
    return y


def write_under_view(x: torch.Tensor) -> torch.Tensor:
    y = x + 1.0
    z = y.view(-1)
    y.mul_(2.0)
    return z


def write_other_dtype(x: torch.Tensor) -> torch.Tensor:
    y = (x * 10).int()
    y.add_(x.int())
    return y


def write_expanded(x: torch.Tensor) -> torch.Tensor:
    y = x.new_zeros(x.shape)
    y.add_(x[:, :1])
    return y


def write_promoted(x: torch.Tensor) -> torch.Tensor:
    y = x.half()
    y.mul_(x)  # stays half; the functional twin would give float32
    return y


@pytest.mark.parametrize("fn", [write_leaf, write_view, write_under_view, write_promoted])
def test_write_without_an_exact_functional_form_stays(fn: Callable[..., Any]) -> None:
    text, lowering = lowered(fn, FLOATS.clone())
    assert re.search(r"aten::(mul|zero)_", text)
    planned, _ = cut(fn, FLOATS.clone())
    written = [c for c in planned.plan.kept if "_ at" in c.operator]
    assert written
    assert lowering.recording.mutated_storages


@pytest.mark.parametrize("fn", [write_other_dtype, write_expanded])
def test_write_with_an_exact_functional_form_is_replaced(fn: Callable[..., Any]) -> None:
    text, lowering = lowered(fn, FLOATS)
    assert "aten::add.Tensor(" in text and "_.Tensor(" not in text
    assert not lowering.recording.mutated_storages


def test_one_hot_keeps_its_range_check() -> None:
    planned, _ = cut(lambda x: F.one_hot(x, 20) * 2, IDS)
    with pytest.raises(Exception, match="[Cc]lass values"):
        run_prefix(planned, IDS + 5)


@pytest.mark.parametrize(
    "fn",
    [
        torch.linalg.svdvals,
        lambda x: torch.linalg.eigvalsh(x @ x.t()),
        torch.linalg.cond,
        lambda x: torch.linalg.cond(x, "nuc"),
        lambda x: torch.linalg.norm(x, "nuc"),
        lambda x: torch.linalg.norm(x, 2, dim=(0, 1), keepdim=True),
        lambda x: torch.linalg.norm(x, 3, dim=0),
        lambda x: torch.linalg.matrix_norm(x, -2),
        lambda x: torch.linalg.matrix_norm(x),
        lambda x: x.norm("nuc"),
        lambda x: torch.norm(x, "nuc", dim=(0, 1)),
    ],
)
def test_singular_values_match_eager_bit_for_bit(fn: Callable[..., Any]) -> None:
    """Some batches had the same bits by the other routine, so that the difference was not noticed
    at first."""
    # A square matrix, since cond of a string has to invert it.
    batches = [torch.randn(8, 8, generator=torch.Generator().manual_seed(k)) for k in range(12)]
    planned, _ = cut(lambda x: fn(x) * 1.0, batches[0])
    assert planned.boundary
    for batch in batches:
        (made,) = run_prefix(planned, batch).values()
        assert_same(made, fn(batch) * 1.0)


def test_random_operators_stay_and_draw_nothing_while_planning() -> None:
    before = torch.get_rng_state()
    planned, _ = cut(lambda x: F.dropout(x * 2.0, 0.5) + torch.rand(8), FLOATS)
    assert torch.equal(torch.get_rng_state(), before)
    stays = {c.operator.partition(" at")[0] for c in planned.plan.kept if c.place == "trainer"}
    assert stays == {"dropout", "rand", "add"}
    assert [c.operator.partition(" at")[0] for c in planned.plan.moved] == ["mul"]


def test_result_sharing_memory_with_the_batch_stays() -> None:
    planned, _ = cut(lambda x: (x.view(-1), x * 2.0), FLOATS)
    assert [c.operator.partition(" at")[0] for c in planned.plan.moved] == ["mul"]
    assert [c.operator.partition(" at")[0] for c in planned.plan.kept] == ["view"]


def test_sizes_assumed_by_kernels_become_conditions() -> None:
    fn, inputs = MOVABLE["stft"]
    _, lowering = cut(fn, *inputs, dims=(0,))
    assert lowering.conditions.hold([WAVE])
    assert not lowering.conditions.hold([torch.randn(5, 256)])
    fn, inputs = MOVABLE["resize antialias"]
    _, lowering = cut(fn, *inputs, dims=(0,))
    assert lowering.conditions.hold([IMAGE]) and lowering.conditions.hold(
        [IMAGE.repeat(5, 1, 1, 1)]
    )
    assert not lowering.conditions.hold([IMAGE[:1]])  # a batch of one broadcasts


def test_operator_using_an_item_value_is_unwritable() -> None:
    text, _ = lowered(lambda x: x.abs() * x.max().item(), FLOATS)
    assert "= aten::abs(" in text and "= unwritable::mul_" in text


def test_data_dependent_branch_is_rejected() -> None:
    with pytest.raises(Unlowerable, match="not a single graph"):
        lowered(lambda x: x if x.sum() > 0 else -x, FLOATS)


def test_rejected_torch_func_transform_leaves_no_functorch_level() -> None:
    """Every later capture ended with "Unsupported functorch tracing attempt"."""
    with pytest.raises(Unlowerable, match="torch.func"):
        lowered(torch.vmap(lambda row: row - row.mean()), torch.randn(3, 4))
    assert torch._C._functorch.peek_interpreter_stack() is None
