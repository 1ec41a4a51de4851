# SPDX-License-Identifier: Apache-2.0
"""The operators of random models: their source templates and their operands.

A template is a line of Python. `{0}` and `{1}` are its operands, `<<a|b>>` is a choice. It is
followed by the kinds of the operands: a letter for the dtype and, if it matters, the number of
dimensions (`F4`, `I2`; `F2+` has two or more). The prefix `~` marks a kind that broadcasts with the
first operand. The prefix `!` marks a line that is run because it writes to its first operand.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operator:
    template: str
    operands: tuple[str, ...]

    @property
    def writes(self) -> bool:
        return self.template.startswith("!")


def _each(template: str, names: str, *operands: str) -> list[Operator]:
    return [Operator(template.replace("NAME", name), operands) for name in names.split()]


def _lines(text: str, *operands: str) -> list[Operator]:
    return [Operator(line.strip(), operands) for line in text.strip().splitlines()]


POINTWISE = [
    *_each(
        "torch.NAME({0})",
        "abs neg sign sgn ceil floor trunc frac round exp exp2 expm1 log log2 log10 log1p sqrt "
        "rsqrt square reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf "
        "erfc erfinv sigmoid logit lgamma digamma i0 sinc deg2rad rad2deg positive isnan isinf "
        "isfinite isposinf isneginf isreal signbit nan_to_num logical_not relu angle",
        "F",
    ),
    *_each(
        "torch.special.NAME({0})",
        "entr ndtr log_ndtr i0e i1 i1e expit erfcx bessel_j0 bessel_j1 bessel_y0 ndtri",
        "F",
    ),
    *_each(
        "F.NAME({0})",
        "relu6 selu celu elu gelu silu mish softplus softsign hardtanh hardswish hardsigmoid "
        "leaky_relu logsigmoid tanhshrink softshrink hardshrink",
        "F",
    ),
    *_lines(
        """
        torch.polygamma(1, {0})
        torch.clamp({0}, <<-1.0|None>>, 1.5)
        {0}.clip(0.0, 1.0)
        torch.round({0}, decimals=2)
        torch.nan_to_num({0}, 0.25, 1.0, -1.0)
        torch.logit({0}, 1e-3)
        F.threshold({0}, 0.1, 20.0)
        F.gelu({0}, approximate="tanh")
        F.elu({0} + 1.0, inplace=True)
        F.relu({0} * 2.0, inplace=True)
        F.dropout({0}, 0.5, False)
        {0} ** <<2|0.5|3.0>>
        torch.pow(2.0, {0})
        torch.float_power({0}, 2)
        2.0 - {0}
        1.0 / {0}
        {0} * <<0.5|-3>> + 1
        {0} > <<0.1|0>>
        torch.heaviside({0}, torch.tensor(0.5, dtype={0}.dtype))
        torch.frexp({0})
        torch.mvlgamma({0}.abs() + 2.0, 2)
        {0}.type_as(self.scale)
        """,
        "F",
    ),
    *_each("torch.NAME({0})", "bitwise_not abs neg sign square logical_not", "I"),
    *_lines(
        """
        {0} // <<3|-2>>
        {0} % <<5|-3>>
        {0} & 6
        {0} | 1
        {0} ^ 5
        torch.bitwise_left_shift({0}, 2)
        torch.bitwise_right_shift({0}, 1)
        torch.gcd({0}, {0} + 3)
        torch.lcm({0}, {0} * 0 + 4)
        torch.div({0}, 3, rounding_mode="<<trunc|floor>>")
        {0} / 3
        torch.fmod({0}, 3)
        {0}.clamp(1, 5)
        {0} * 0.5
        """,
        "I",
    ),
    *_lines("~{0}\ntorch.logical_not({0})\n{0} * 2\n{0}.float() - 0.5", "B"),
]

BINARY = [
    *_each(
        "torch.NAME({0}, {1})",
        "add sub mul div true_divide atan2 maximum minimum fmax fmin fmod remainder hypot copysign "
        "logaddexp logaddexp2 xlogy nextafter floor_divide eq ne lt le gt ge isclose rsub "
        "logical_and logical_or logical_xor",
        "F",
        "~F",
    ),
    *_each("torch.NAME({0}, {1})", "add sub mul maximum minimum eq ne lt ge pow", "N", "~N"),
    *_each("torch.bitwise_NAME({0}, {1})", "and or xor", "I", "~I"),
    *_each("torch.NAME({0}, {1})", "logical_and logical_or bitwise_and bitwise_xor", "B", "~B"),
    *_lines(
        """
        torch.add({0}, {1}, alpha=<<2|-1>>)
        torch.lerp({0}, {1}.to({0}.dtype), 0.3)
        torch.addcdiv({0}, {1}, {1}.abs() + 1.0)
        {0}.addcdiv({1}, {1}.abs() + 1.0, value=0.5)
        torch.addcmul({0}, {1}, {1}, value=0.5)
        torch.where({0} > {1}, {0}, {1})
        torch.where({1} > 0, {0}, <<0.0|float("nan")>>)
        torch.ldexp({0}, {1}.clamp(-3, 3).floor())
        torch.special.zeta({0}.abs() + 1.5, {1}.abs() + 1.0)
        torch.div({0}, {1}, rounding_mode="<<floor|trunc>>")
        torch.broadcast_tensors({0}, {1})
        torch.dist({0}, {1})
        F.mse_loss({0}, {1}.to({0}.dtype).expand_as({0}), reduction="<<none|mean|sum>>")
        F.smooth_l1_loss({0}, {1}.to({0}.dtype).expand_as({0}), reduction="none")
        """,
        "F",
        "~F",
    ),
    *_lines(
        """
        {1}.masked_fill({0}, <<0.0|-1.0>>)
        torch.where({0}, {1}, 1.0)
        torch.where({0}, {1}, self.scale[:1])
        """,
        "B",
        "~F",
    ),
]

REDUCTIONS = [
    *_each(
        "torch.NAME({0}, <<-1|0|(-1,)>>, keepdim=<<True|False>>)",
        "sum mean amax amin nansum nanmean logsumexp",
        "F1+",
    ),
    *_each(
        "torch.NAME({0}, <<-1|0>>, keepdim=<<True|False>>)",
        "std var std_mean var_mean max min median nanmedian mode prod argmax argmin any all",
        "F1+",
    ),
    *_each("{0}.NAME()", "sum mean max min amax amin std var prod norm argmax median any", "F"),
    *_each("{0}.NAME(-1)", "sum amax argmin cumsum cumprod any all prod", "I1+"),
    *_each("{0}.NAME(<<-1|0>>)", "any all sum cumsum", "B1+"),
    *_lines(
        """
        torch.kthvalue({0}, 2, -1)
        torch.aminmax({0}, dim=-1)
        torch.count_nonzero({0}, -1)
        torch.norm({0}, <<2|1|float("inf")>>, -1)
        torch.linalg.vector_norm({0}, <<2|3>>, -1)
        F.normalize({0}, dim=-1)
        torch.var({0}, -1, correction=0, keepdim=True)
        torch.sum({0}, -1, dtype=torch.float64)
        F.softmax({0}, <<-1|0>>)
        F.log_softmax({0}, -1)
        F.softmin({0}, -1)
        torch.logcumsumexp({0}, -1)
        torch.cumsum({0}, <<-1|0>>)
        torch.cumprod({0}, -1)
        torch.cummax({0}, -1)
        torch.cummin({0}, -1)
        torch.diff({0}, dim=-1)
        torch.trapezoid({0}, dim=-1)
        torch.cumulative_trapezoid({0}, dim=-1)
        torch.sort({0}, -1, descending=<<True|False>>)
        torch.sort({0}, stable=True)
        torch.argsort({0}, -1)
        torch.topk({0}, 2, -1)
        torch.msort({0})
        torch.renorm({0}[None], 2, 0, 1.5)
        torch.softmax({0}, -1, dtype=torch.float64)
        F.glu({0}[..., :{0}.shape[-1] // 2 * 2], -1)
        """,
        "F1+",
    ),
]

VIEWS = [
    *_lines(
        """
        {0}.t().contiguous()
        {0}.T
        torch.tril({0}, <<0|-1>>)
        torch.triu({0}, 1)
        torch.diagonal({0}, <<0|1>>)
        torch.trace({0})
        torch.rot90({0})
        torch.fliplr({0})
        torch.diag({0})
        torch.diag_embed({0})
        torch.take_along_dim({0}, torch.argsort({0}, -1), -1)
        torch.tensor_split({0}, 2, 1)
        {0}.as_strided((2, 2), (1, 2))
        """,
        "N2",
    ),
    *_lines(
        """
        {0}.reshape(-1)
        {0}.flatten()
        {0}.reshape({0}.shape[0], -1)
        {0}.view({0}.shape)
        {0}[None]
        {0}[..., None]
        {0}.unsqueeze(-1)
        {0}.squeeze()
        {0}.transpose(0, -1)
        {0}.movedim(0, -1)
        {0}.swapaxes(0, -1)
        {0}.mT if {0}.dim() > 1 else {0}[:1]
        {0}[<<0|-1>>]
        {0}[1:]
        {0}[..., :2]
        {0}[..., ::2]
        {0}.narrow(-1, 0, 2)
        {0}.select(-1, 1)
        {0}.flip(<<-1|0>>)
        {0}.roll(1, <<-1|0>>)
        {0}.expand(2, *{0}.shape)
        {0}.repeat(*([1] * ({0}.dim() - 1)), 2)
        {0}.repeat_interleave(2, -1)
        {0}.tile(2)
        {0}.unbind(-1)[:3]
        {0}.chunk(2, -1)
        {0}.split(2, -1)[:4]
        {0}.split([1, {0}.shape[-1] - 1], -1)
        {0}.unfold(-1, 2, <<1|2>>)
        {0}.contiguous()
        {0}.clone()
        {0}.detach()
        {0}.detach().clone()
        {0}.unflatten(-1, (1, -1))
        {0}.ravel()
        {0}.broadcast_to(2, *{0}.shape)
        {0}.view_as({0})
        {0}.expand_as({0})
        {0}.take(torch.tensor([0, 1, 1]))
        {0}.index_select(-1, torch.tensor([1, 0]))
        {0}[torch.tensor([1, 0, 1])]
        {0}[..., [0, 1]]
        torch.atleast_2d({0})
        torch.atleast_3d({0})
        torch.cat([{0}, {0}], <<-1|0>>)
        torch.stack([{0}, {0}], <<0|-1>>)
        torch.hstack([{0}, {0}])
        torch.vstack([{0}, {0}])
        torch.dstack([{0}, {0}])
        torch.block_diag({0}.reshape(1, -1), {0}.reshape(-1, 1)[:2])
        torch.column_stack([{0}, {0}])
        torch.cartesian_prod({0}.reshape(-1)[:3], {0}.reshape(-1)[:2])
        torch.meshgrid({0}.reshape(-1)[:3], {0}.reshape(-1)[:2], indexing="<<ij|xy>>")
        torch.vander({0}.reshape(-1)[:4], 3)
        torch.flatten({0}, 0, -1)
        torch.constant_pad_nd({0}, (1, 0), 2)
        F.pad({0}, (1, 2), value=0)
        F.pad({0}, (0, -1))
        torch.scatter({0}, -1, torch.zeros_like({0}, dtype=torch.int64), 2)
        torch.index_fill({0}, -1, torch.tensor([0]), 3)
        torch.select_scatter({0}, {0}.select(-1, 0), -1, 1)
        torch.slice_scatter({0}, {0}[..., :1], -1, 1, 2)
        """,
        "N1+",
    ),
    *_lines("{0}.view(torch.int32)\n{0}.view(torch.uint8)", "F2"),
    *_lines("F.pixel_shuffle({0}[:, :1].expand(-1, 4, -1, -1), 2)", "F4"),
]

INDEXING = [
    *_lines(
        """
        torch.gather({0}, -1, {1} % {0}.shape[-1])
        torch.scatter_add({0}, -1, {1} % {0}.shape[-1], {0})
        torch.scatter_reduce({0}, -1, {1} % {0}.shape[-1], {0}, "<<amax|prod|sum|mean>>")
        torch.index_add({0}, 0, {1}.reshape(-1)[:{0}.shape[0]] % {0}.shape[0], {0})
        torch.index_copy({0}, 0, {1}.reshape(-1)[:1] % {0}.shape[0], {0}[:1])
        torch.index_put({0}, ({1}.reshape(-1)[:1] % {0}.shape[0],), {0}[:1])
        {0}[{1}.reshape(-1)[:3] % {0}.shape[0]]
        {0}[{1}.reshape(-1)[:2] % {0}.shape[0], {1}.reshape(-1)[:2] % {0}.shape[1]]
        {0}[:, {1}.reshape(-1)[:2] % {0}.shape[1]]
        torch.take({0}, {1} % 4)
        torch.index_reduce({0}, 0, {1}.reshape(-1)[:1] % {0}.shape[0], {0}[:1], "amax")
        """,
        "F2",
        "I2",
    ),
    *_lines(
        """
        F.one_hot({0} % 5, 5)
        F.embedding({0} % 8, self.table)
        self.table[{0} % 8]
        self.order[{0} % 8]
        F.embedding_bag({0} % 8, self.table, mode="<<mean|sum>>")
        torch.isin({0}, torch.tensor([1, 3]))
        torch.zeros({0}.shape[0], 9).scatter_(1, {0} % 9, 1.0)
        torch.zeros({0}.shape[0], 9).scatter_add_(1, {0} % 9, torch.ones({0}.shape))
        """,
        "I2",
    ),
    *_lines(
        """
        torch.bucketize({0}, torch.tensor([-1.0, 0.0, 1.0]), right=<<True|False>>)
        torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0], dtype={0}.dtype), {0})
        torch.histc({0}.float(), 5, -2.0, 2.0)
        torch.isclose({0}, torch.zeros((), dtype={0}.dtype))
        """,
        "F1+",
    ),
]

MATRICES = [
    *_lines(
        """
        torch.matmul({0}, {0}.mT)
        torch.mm({0}, {0}.t())
        torch.einsum("ij,kj->ik", {0}, {0})
        torch.einsum("ij->ji", {0})
        torch.tensordot({0}, {0}, dims=([1], [1]))
        torch.outer({0}[0], {0}[:, 0])
        torch.dot({0}[0], {0}[-1])
        torch.vdot({0}[0], {0}[-1])
        torch.inner({0}, {0})
        torch.mv({0}, {0}[0])
        torch.addmm({0}[:, :1], {0}, {0}.t()[:, :1])
        torch.addmv({0}[:, 0], {0}, {0}[0])
        torch.addr({0}, {0}[:, 0], {0}[0])
        torch.bmm({0}[None], {0}.t()[None])
        torch.baddbmm({0}[None, :, :1], {0}[None], {0}.t()[None, :, :1])
        torch.addbmm({0}[:, :1], {0}[None], {0}.t()[None, :, :1])
        torch.chain_matmul({0}, {0}.t())
        torch.linalg.multi_dot([{0}, {0}.t(), {0}])
        torch.kron({0}[:2, :2], {0}[:1])
        torch.cdist({0}, {0})
        F.pairwise_distance({0}, {0} + 1.0)
        F.cosine_similarity({0}, {0}.flip(0), dim=-1)
        torch.cross({0}[:, :3], {0}[:, :3].flip(0), dim=-1)
        torch.matrix_power({0} @ {0}.t() * 0.1, 2)
        torch.matrix_exp(({0} @ {0}.t()).clamp(-1, 1) * 0.1)
        torch.linalg.det({0} @ {0}.t())
        torch.linalg.slogdet({0} @ {0}.t() + torch.eye({0}.shape[0], dtype={0}.dtype))
        torch.linalg.inv({0} @ {0}.t() + 9 * torch.eye({0}.shape[0], dtype={0}.dtype))
        torch.linalg.solve({0} @ {0}.t() + 9 * torch.eye({0}.shape[0], dtype={0}.dtype), {0})
        torch.linalg.cholesky({0} @ {0}.t() + 9 * torch.eye({0}.shape[0], dtype={0}.dtype))
        torch.linalg.qr({0})
        torch.linalg.svdvals({0})
        torch.linalg.svd({0}, full_matrices=False)
        torch.linalg.eigh({0} @ {0}.t())
        torch.linalg.eigvalsh({0} @ {0}.t())
        torch.linalg.lu({0} @ {0}.t())
        torch.linalg.lu_factor({0} @ {0}.t())
        torch.linalg.pinv({0})
        torch.linalg.matrix_norm({0})
        torch.linalg.matrix_rank({0})
        torch.linalg.norm({0})
        torch.triangular_solve({0}[:, :1], torch.eye({0}.shape[0], dtype={0}.dtype))
        torch.linalg.solve_triangular(torch.eye({0}.shape[0], dtype={0}.dtype), {0}, upper=True)
        torch.linalg.vecdot({0}, {0})
        torch.logdet({0} @ {0}.t() + 9 * torch.eye({0}.shape[0], dtype={0}.dtype))
        F.linear({0}, {0})
        F.bilinear({0}, {0}, torch.ones(2, {0}.shape[1], {0}.shape[1], dtype={0}.dtype))
        F.layer_norm({0}, {0}.shape[-1:])
        F.rms_norm({0}, {0}.shape[-1:])
        F.group_norm({0}, 1)
        F.batch_norm({0}, None, None, training=True)
        F.scaled_dot_product_attention({0}[None], {0}[None], {0}[None])
        F.cross_entropy({0}, torch.zeros({0}.shape[0], dtype=torch.int64), reduction="none")
        F.nll_loss({0}, torch.zeros({0}.shape[0], dtype=torch.int64))
        F.kl_div({0}, {0}.sigmoid(), reduction="sum")
        F.binary_cross_entropy_with_logits({0}, {0}.sigmoid())
        F.avg_pool1d({0}, 2)
        F.max_pool1d({0}, 2)
        torch.polar({0}.abs(), {0})
        torch.complex({0}, {0} * 2.0)
        """,
        "F2",
    ),
    *_lines(
        """
        {0} @ self.square
        F.linear({0}, self.square, self.scale)
        {0} * self.scale + self.shift
        torch.addmm(self.scale, {0}, self.square)
        torch.searchsorted(self.scale.sort()[0], {0})
        ({0} - {0}.mean(0)) / ({0}.std(0) + self.scale.abs())
        """,
        "E2",
    ),
]

SIGNALS = [
    *_lines(
        """
        torch.fft.fft({0})
        torch.fft.rfft({0})
        torch.fft.rfft({0}).abs()
        torch.view_as_real(torch.fft.rfft({0}))
        torch.fft.irfft(torch.fft.rfft({0}), {0}.shape[-1])
        torch.fft.ifft({0})
        torch.fft.hfft({0})
        torch.fft.fft2({0})
        torch.fft.rfft2({0})
        torch.fft.fftshift({0})
        torch.fft.ifftshift({0})
        torch.real(torch.fft.rfft({0}))
        torch.imag(torch.fft.rfft({0}))
        torch.angle(torch.fft.rfft({0}))
        torch.conj(torch.fft.rfft({0})) * 2.0
        torch.fft.rfft({0}).conj().resolve_conj()
        torch.stft({0}.reshape(1, -1).float(), 4, 2, window=torch.hann_window(4), \
return_complex=True, pad_mode="constant")
        torch.conv1d({0}[:, :1], torch.ones(2, 1, 2, dtype={0}.dtype))
        F.conv_transpose1d({0}[:, :1], torch.ones(1, 2, 2, dtype={0}.dtype))
        F.adaptive_avg_pool1d({0}, 3)
        F.adaptive_max_pool1d({0}, 3)
        F.lp_pool1d({0}, 2, 2)
        F.instance_norm({0})
        F.interpolate({0}, size=5, mode="<<nearest|linear>>")
        F.interpolate({0}, scale_factor=2.0)
        F.pad({0}, (1, 1), mode="<<reflect|replicate|circular>>")
        F.local_response_norm({0}, 2)
        F.scaled_dot_product_attention({0}, {0}, {0})
        F.channel_shuffle({0}[:, :, :, None], 2)
        """,
        "F3",
    ),
    *_lines(
        """
        F.interpolate({0}, size=(4, 3), mode="bilinear", antialias=True)
        F.interpolate({0}, size=4, mode="<<bilinear|bicubic>>", align_corners=<<False|True>>)
        F.interpolate({0}, size=4, mode="<<nearest|nearest-exact|area>>")
        F.interpolate({0}, scale_factor=1.5, mode="bilinear")
        F.interpolate({0}, size=(4, 3), mode="bicubic", antialias=True)
        F.avg_pool2d({0}, 2)
        F.max_pool2d({0}, 2, return_indices=<<True|False>>)
        F.adaptive_avg_pool2d({0}, 2)
        F.adaptive_max_pool2d({0}, 2)
        F.lp_pool2d({0}, 2, 2)
        F.conv2d({0}, torch.ones(2, {0}.shape[1], 2, 2, dtype={0}.dtype))
        F.conv_transpose2d({0}, torch.ones({0}.shape[1], 2, 2, 2, dtype={0}.dtype))
        F.unfold({0}, 2)
        F.fold(F.unfold({0}, 2), {0}.shape[-2:], 2)
        F.pad({0}, (1, 1, 1, 1), mode="<<reflect|replicate|circular|constant>>")
        F.pixel_unshuffle({0}[..., :4, :4], 2)
        F.group_norm({0}, 1)
        F.grid_sample({0}, torch.zeros({0}.shape[0], 2, 2, 2, dtype={0}.dtype), align_corners=False)
        F.affine_grid({0}.new_ones({0}.shape[0], 2, 3), {0}.shape, align_corners=False)
        {0}.contiguous(memory_format=torch.channels_last)
        {0}.to(memory_format=torch.channels_last) + 1.0
        {0}.permute(0, 2, 3, 1)
        {0}.mean((2, 3))
        {0}.amax((1, 2, 3), keepdim=True)
        {0}.flip(-1)
        torch.channel_shuffle({0}.repeat(1, 2, 1, 1), 2)
        torch.native_channel_shuffle({0}.repeat(1, 2, 1, 1), 2)
        F.instance_norm({0})
        F.dropout2d({0}, 0.5, False)
        """,
        "F4",
    ),
    *_lines("{0}.permute(0, 2, 3, 1)\n{0}.float() / 255\n{0}[:, :, 1:4].to(torch.int32)", "I4"),
    *_lines(
        """
        {0}.abs()
        {0}.real + {0}.imag
        torch.view_as_real({0})
        {0}.conj()
        {0} * {0}
        torch.angle({0})
        {0}.conj().imag
        torch.exp({0})
        {0}.sum(-1)
        {0}.to(torch.complex128)
        """,
        "C1+",
    ),
]

CASTS_AND_FACTORIES = [
    *_each("{0}.NAME()", "float double long int half bfloat16 bool", "N"),
    *_lines(
        """
        {0}.to(torch.<<float32|float64|int16|uint8|bool>>)
        {0}.to(torch.float32, copy=True)
        {0}.to(self.scale)
        torch.zeros_like({0})
        torch.ones_like({0}, dtype=torch.<<float32|int64>>)
        torch.full_like({0}, 3)
        {0}.new_zeros({0}.shape)
        {0}.new_full((2, 3), 4)
        {0}.new_tensor([1, 2])
        {0}.new_ones(2)
        torch.zeros({0}.shape)
        torch.full({0}.shape, 0.5) + {0}
        torch.arange({0}.numel()) * 2
        torch.arange(0, {0}.dim() + 1, 0.5)
        torch.linspace(0.0, 1.0, {0}.numel() % 9 + 1)
        torch.logspace(0.0, 1.0, 4)
        torch.eye({0}.dim() + 1)
        torch.tensor([0.1, 0.2, 0.3]) * 2.0
        torch.hann_window({0}.dim() + 2)
        torch.hamming_window(4)
        torch.tril_indices(3, 3)
        torch.scalar_tensor(2.5) + {0}
        torch.tensor({0}.shape)
        torch.tensor({0}.dim() * 1.5)
        torch.empty_like({0}).copy_({0})
        torch.as_tensor({0})
        torch.broadcast_to({0}, {0}.shape)
        """,
        "N",
    ),
]

DRAWS = [
    *_lines(
        """
        F.dropout({0}, 0.5, self.training)
        F.alpha_dropout({0}, 0.5, self.training)
        torch.rand_like({0})
        torch.randn_like({0})
        torch.bernoulli({0}.sigmoid().nan_to_num(0.5))
        torch.randint_like({0}, 5)
        torch.normal({0}, 1.0)
        {0} + torch.randn({0}.shape)
        torch.randperm(5)
        torch.rand(3)
        torch.multinomial(torch.ones(4), 2)
        F.rrelu({0}, training=self.training)
        torch.zeros_like({0}).uniform_()
        torch.zeros_like({0}).normal_()
        torch.zeros_like({0}).bernoulli_(0.5)
        F.gumbel_softmax({0}[None], dim=-1)
        """,
        "F",
    ),
]

WRITES = [
    *_each("!{0}.NAME_({1})", "add sub mul div atan2 copysign copy fmod remainder", "F", "~F"),
    *_each("!{0}.NAME_({1})", "lt ge eq logical_and hypot", "F", "~F"),
    *_each("!{0}.NAME_({1})", "add mul copy bitwise_and", "I", "~I"),
    *_each(
        "!{0}.NAME_()",
        "abs neg exp sqrt rsqrt sin tanh sigmoid relu floor round zero square reciprocal log1p erf "
        "nan_to_num sign",
        "F",
    ),
    *_lines(
        """
        !{0}.add_(<<1.0|2>>)
        !{0}.mul_(0.5)
        !{0}.sub_(self.scale[0])
        !{0}.clamp_(-1.0, 1.0)
        !{0}.fill_(<<0.5|2>>)
        !{0}.pow_(2)
        !{0}[0].mul_(2.0)
        !{0}[..., :1] = 0.25
        !{0}[..., 0] += 1.0
        !{0}[{0} > 0.5] = 0.125
        !{0}.view(-1)[1:].add_(1.0)
        !{0}.masked_fill_({0} > 1.0, 0.0)
        !{0}.index_fill_(-1, torch.tensor([0]), 2.0)
        !{0}.index_put_((torch.tensor([0, 1]),), torch.tensor(1.5).to({0}.dtype))
        !{0}.index_add_(0, torch.tensor([0]), {0}[:1].clone())
        !{0}.index_copy_(0, torch.tensor([0]), {0}[1:2].clone())
        !{0}.scatter_(-1, torch.zeros_like({0}, dtype=torch.int64), 0.5)
        !{0}.scatter_add_(-1, torch.zeros_like({0}, dtype=torch.int64), {0}.clone())
        !{0}.cumsum_(-1)
        !{0}.tril_() if {0}.dim() > 1 else None
        !F.relu({0}, inplace=True)
        !F.hardtanh({0}, -0.5, 0.5, True)
        !F.leaky_relu({0}, inplace=True)
        !F.dropout({0}, 0.5, self.training, inplace=True)
        !{0}.uniform_()
        !{0}.bernoulli_(0.5)
        !{0}.addcmul_({0}, {0}, value=0.5)
        !{0}.lerp_({0} * 2, 0.5)
        !{0}.data.mul_(0.5)
        !{0}.detach().add_(1.0)
        !{0}.addcdiv_({0}, {0}.abs() + 1.0, value=0.5)
        !{0}.add_({0}, alpha=0.3)
        !{0}.detach_()
        """,
        "F1+",
    ),
    *_lines("!torch.add({0}, 1.0, out={0})\n!torch.mul({1}, 2.0, out={0})", "F", "~F"),
]

# Run with the available values and never with an operand that they write to: a model counts in the
# buffers `steps` and `running`.
STATISTICS = _lines(
    """
    !self.steps.add_(1)
    !self.steps += {0}.shape[0]
    !self.running.mul_(0.9).add_({0}.float().mean(), alpha=0.1)
    !self.running[:2] = {0}.float().mean()
    !self.running.copy_(self.running + 1.0)
    {0} + self.running[:1]
    {0} * self.steps
    self.running * 2.0
    self.running[1:3]
    """,
    "F",
)

PARAMETERS = [
    *_lines(
        """
        {0} * self.gain[0]
        {0}.float().mean() * self.gain
        {0} + self.weight.mean()
        torch.where({0} > 0, {0}, self.gain[1])
        torch.zeros_like({0}) + self.gain.sum()
        self.gain * 2.0
        self.weight.t()
        self.gain.detach() * 2.0
        (self.gain * 2.0).detach()
        self.weight.data[0]
        """,
        "F",
    ),
    *_lines(
        """
        self.linear({0})
        self.layer_norm({0})
        self.batch_norm({0})
        {0} @ self.weight
        """,
        "E2",
    ),
    *_lines("self.embed({0} % 8)", "I2"),
    *_lines("self.conv({0})", "G4"),
]

# A model with one of these runs whole, as without penstock, and the plan gives the reason. Dynamo
# does not support them or gets them wrong.
REFUSED = [
    *_lines(
        """
        torch.bincount({0}.reshape(-1) % 7, minlength=7)
        torch.combinations({0}.reshape(-1)[:4])
        torch.nonzero({0})
        torch.unique({0})
        {0}[{0} > 2]
        """,
        "I2",
    ),
    *_lines(
        """
        torch.masked_select({0}, {0} > 0.5)
        torch.quantile({0}.float(), 0.5, dim=-1)
        torch.cov({0})
        torch.corrcoef({0})
        torch.addcdiv({0}, {0}, {0}.abs() + 1.0, value=0.5)
        {0} * {0}.sum().item()
        !{0}.transpose_(0, -1)
        !{0}.t_()
        !{0}.unsqueeze_(0)
        !{0}.squeeze_()
        """,
        "F2",
    ),
]

FAMILIES = {
    "pointwise": POINTWISE,
    "binary": BINARY,
    "reductions": REDUCTIONS,
    "views": VIEWS,
    "indexing": INDEXING,
    "matrices": MATRICES,
    "signals": SIGNALS,
    "casts": CASTS_AND_FACTORIES,
    "draws": DRAWS,
    "writes": WRITES,
    "statistics": STATISTICS,
    "parameters": PARAMETERS,
}
