"""Templates of steps, with every argument that matters: see ``Draft`` for tokens, ``<a|b>`` is a choice.

Capitals stand for values that a template makes; lines are separated by semicolons.
"""

from __future__ import annotations

import re


def _lines(text: str) -> tuple[str, ...]:
    return tuple(re.sub(r"\s+", " ", line).strip() for line in text.strip().splitlines())


STEPS = _lines("""
    A = {t} + {s}
    A = {t} - {s}
    A = {t} * {s}
    A = {t} / {s}
    A = {n} - {t}
    A = {n} / {t}
    A = {n} * {t}
    A = {t} / {n}
    A = {t} ** <2|3|-1|-2|0.5|1.5|0|{n}>
    A = <{n}|2> ** {t}
    A = torch.add({t}, {s}, alpha={n})
    A = torch.sub({t}, {s}, alpha={n})
    A = torch.rsub({t}, <{s}|{n}>, alpha={n})
    A = torch.div({t}, <{s}|{n}>, rounding_mode=<None|'trunc'|'floor'>)
    A = torch.addcmul({t}, {s}, {s}, value={n})
    A = torch.addcdiv({t}, {s}, {s}, value={n})
    A = torch.<fmod|remainder|floor_divide>({t}, <{s}|{n}>)
    A = torch.lerp({t}, {s}, <{n}|{s}>)
    A = torch.clamp({t}, <{n}|None>, <{n}|1.0>)
    A = torch.clamp({t}, min=<{s}|None>, max={s})
    A = F.hardtanh({t}, <-1.0|{n}>, <1.0|{n}>)
    A = F.threshold({t}, {n}, {n})
    A = torch.<maximum|minimum|fmax|fmin|atan2|hypot|logaddexp|copysign>({t}, {s})
    A = torch.where({t} > {n}, <{s}|{n}|{t}>, <{s}|{n}|{t}>)
    A = {t}.masked_fill({s} > {n}, {n})
    A = torch.<exp|exp2|expm1|sigmoid|tanh|erf|erfc|atan|sin|cos>({t})
    A = torch.<sinh|cosh|asinh|acosh|tan|log|log2|log10|log1p>({t})
    A = torch.<sqrt|rsqrt|reciprocal|square|abs|neg|floor|ceil|round|trunc|sign>({t})
    A = torch.<frac|digamma|lgamma|erfinv|logit>({t})
    A = torch.round({t}, decimals=<1|2|-1|-2>)
    A = {t}.abs().<sqrt|log|rsqrt|log1p|reciprocal>()
    A = ({t}.abs() + {n}).<sqrt|log|rsqrt|log2|reciprocal>()
    A = F.<relu|relu6|gelu|silu|mish|hardswish|hardsigmoid|softplus|logsigmoid>({t})
    A = F.<selu|elu|celu|tanhshrink|softsign>({t})
    A = F.gelu({t}, approximate='tanh')
    A = F.<elu|celu>({t}, alpha=<{n}|2.0>)
    A = F.<elu|celu>({t}, alpha=<-1.0|-0.5|-3.0>)
    A = F.<elu|celu>({t} - 2.0, alpha=<-1.0|-0.3|0.5>)
    A = F.leaky_relu({t}, <0.01|-0.3|-2.0|1.5|{n}>)
    A = F.softplus({t}, beta=<1|2|-1|0.1|{n}>, threshold=<20|1|-5|{n}>)
    A = F.<hardshrink|softshrink>({t}, <0.5|2.0|0.0>)
    A = F.prelu({t}, {w})
    A = F.glu({t}, {dim})
    A = torch.logit({t}, eps=<1e-4|0.3|None>)
    A = torch.nan_to_num({t}, nan={n}, posinf={n}, neginf={n})
    A = torch.<softmax|log_softmax>({t}, {dim})
    A = torch.<softmax|log_softmax>({t}, {dim}, dtype={dtype})
    A = F.softmin({t}, {dim})
    A = torch.logsumexp({t}, {dim}, {keep})
    A = {t}.<sum|mean|nansum|nanmean>()
    A = {t}.<sum|mean|amax|amin|nansum|logsumexp>(<{dim}|{dims}>, {keep})
    A = torch.<sum|mean>({t}, {dim}, keepdim={bool}, dtype={dtype})
    A = {a}.sum(<{dim}|{dims}>, {bool}, dtype=<None|{dtype}>)
    A = torch.<max|min|median|mode>({t}, {dim}, {bool})
    A = torch.<max|min>({t})
    A = torch.<var|std>({t}, <{dim}|{dims}>, correction=<0|1|2|1.5|-1|7>, keepdim={bool})
    A = torch.<var|std>({t}, unbiased={bool})
    A = torch.<var_mean|std_mean>({t}, {dim}, correction=<0|1|2>, keepdim={bool})
    A = torch.<cumsum|cumprod|logcumsumexp>({t}, {dim})
    A = torch.<cummax|cummin>({t}, {dim})
    A = torch.prod({t}, {dim}, {bool})
    A = torch.linalg.vector_norm({t}, ord=<2|1|0|3|float('inf')|float('-inf')|-1|0.5>, \
        dim=<{dim}|{dims}|None>, keepdim={bool})
    A = torch.norm({t}, p=<2|1|0.5|'fro'|float('inf')>, dim=<{dim}|{dims}|None>, keepdim={bool})
    A = {t}.norm()
    A = F.normalize({t}, p=<2|1|3.0>, dim={dim}, eps={eps})
    A = F.cosine_similarity({t}, {s}, dim={dim}, eps={eps})
    A = F.layer_norm({t}, {trailing}, eps={eps})
    A = {t}; B = F.layer_norm(A, {trailing}, <{trailing_weight}|None>, <{trailing_weight}|None>, {eps})
    A = {t}; B = F.rms_norm(A, {trailing}, <{trailing_weight}|None>, <None|{eps}>)
    A = F.group_norm({m}, <1|2|3|4>, <None|{channels}>, <None|{channels}>, {eps})
    A = F.batch_norm({m}, {channels}, {variances}, <None|{channels}>, <None|{channels}>, False, 0.1, {eps})
    A = F.batch_norm({m}, None, None, <None|{channels}>, <None|{channels}>, True, 0.1, {eps})
    A = F.instance_norm({m}, eps={eps})
    A = F.linear({t}, {matrix}, <None|{outputs}>)
    A = torch.addmm(<{outputs}|{w}>, {m}, {columns}, beta=<1|{n}>, alpha=<1|{n}>)
    A = {t} @ {columns}
    A = {m} @ {m}
    A = {m}.flatten(0, -2); B = torch.<mm|matmul>(A, {columns})
    A = {m}.flatten(0, -2); B = A.addmm_(A, A.mT @ A, beta=<1|{n}>, alpha=<1|{n}>)
    A = {m}; B = A.reshape(-1, *A.shape[-2:]); C = torch.bmm(B, <B.mT|B.mT * {n}|B.softmax(-1).mT>)
    A = {m} @ {m}.mT
    A = {m}.mT @ {m}
    A = torch.<bmm|matmul|mm>({m}, {m})
    A = torch.<mv|matmul|dot>({t}, {t})
    A = torch.<baddbmm>({t}, {m}, {m}, beta={n}, alpha={n})
    A = torch.einsum('...ij,...ik->...jk', {m}, {m})
    A = torch.einsum('...i,...i->...', {t}, {s})
    A = {m}; B = F.scaled_dot_product_attention(A, <A|A.flip(-2)>, <A|A * {n}|A.relu()>, \
        scale=<None|{n}>, is_causal={bool})
    A = {m}; B = F.scaled_dot_product_attention(A, A, A, attn_mask=<A @ A.mT|torch.gt(A @ A.mT, {n})>)
    A = {m}; B = torch.softmax(A @ A.mT, <-1|-2|{dim}>) @ A
    A = torch.softmax({m}, {dim}) @ {columns}
    A = F.conv1d({image}, {kernel1}, <None|{kernel_bias}>, stride={k}, padding=<0|1|2|'same'|'valid'>, \
        dilation={k}, groups={groups})
    A = F.conv2d({image}, {kernel2}, <None|{kernel_bias}>, stride={k}, padding=<0|1|2|'same'|'valid'>, \
        dilation={k}, groups={groups})
    A = F.conv3d({image}, {kernel3}, <None|{kernel_bias}>, stride={k}, padding=<0|1|2>, dilation={k}, \
        groups={groups})
    A = F.conv_transpose<1|2>d({image}, {kernel2}, padding=<0|1>)
    A = F.<max|avg>_pool<1|2|3>d({image}, 2)
    A = F.max_pool<1|2|3>d({image}, 2, return_indices=True)
    A = F.max_pool<1|2|3>d({t}, {k}, stride=<None|1|2>, padding=<0|1>, dilation=<1|2>, \
        ceil_mode={bool}, return_indices={bool})
    A = F.avg_pool<1|2|3>d({t}, {k}, stride=<None|1|2>, padding=<0|1>, ceil_mode={bool}, \
        count_include_pad={bool})
    A = F.avg_pool<2|3>d({t}, {k}, padding=<0|1>, ceil_mode={bool}, divisor_override=<1|2|-1|9>)
    A = F.adaptive_<max|avg>_pool<1|2|3>d({t}, <1|2|3>)
    A = F.adaptive_max_pool<1|2|3>d({t}, <1|2|3>, return_indices=True)
    A = F.lp_pool2d({t}, 2, 2)
    A = F.interpolate({image}, scale_factor=<2|0.5|1.7>, \
        mode=<'nearest'|'nearest'|'bilinear'|'bicubic'|'linear'|'area'|'nearest-exact'>)
    A = F.pixel_<shuffle|unshuffle>({image}, <1|2>)
    A = F.embedding({indices}, {table}, padding_idx=<None|1>, scale_grad_by_freq={bool})
    A = F.embedding_bag({indices}, {table}, mode=<'sum'|'mean'|'max'>)
    A = F.one_hot({indices}, 12)
    A = {t}.<transpose|swapaxes|swapdims>({dim}, {dim})
    A = {t}.permute({order})
    A = torch.<movedim|moveaxis>({t}, {dim}, {dim})
    A = {t}.movedim({order}, {order})
    A = {m}.<mT|T|mH|t()>
    A = {t}.<t|ravel|flatten|squeeze|contiguous|clone|detach|positive|relu|cpu>()
    A = {t}.flatten({dim}, <-1|{dim}>)
    A = {t}.unflatten({dim}, <[1, -1]|[-1, 1]|[2, -1]>)
    A = {t}.<view|reshape>({shape})
    A = {t}.<squeeze|unsqueeze>({dim})
    A = torch.atleast_<1|2|3>d({t})
    A = {t}.<expand_as|view_as|reshape_as|type_as>({a})
    A = {t}.expand(<2, 1, -1, -1|3, -1|2, 3, -1, -1|-1|2>)
    A = torch.broadcast_to({t}, <[2]|[1]|[]> + list({t}.shape))
    A = {t}[{slice}]
    A = {t}[..., {slice}]
    A = {t}.select({dim}, <0|-1>)
    A = {t}.narrow({dim}, <0|1>, {k})
    A = {t}.index_select({dim}, {indices1})
    A = {t}.gather({dim}, {indices_like})
    A = {t}.take_along_dim({indices_like}, {dim})
    A = {t}.take({indices})
    A = {t}[<{indices}|:, {indices1}>]
    A = torch.<flip>({t}, <{dims}|[{dim}]>)
    A = torch.roll({t}, <1|-2|5>, {dim})
    A = torch.rot90({t})
    A = {t}.repeat(<2|1, 2|2, 1, 1|1, 2, 1, 2|3, 1, 1, 2>)
    A = torch.tile({t}, <(2,)|(1, 2)|(2, 1, 1)>)
    A = torch.repeat_interleave({t}, {k}, dim=<{dim}|None>)
    A = {t}.<tril|triu>(<0|1|-1|5>)
    A = {t}.diagonal(<0|1|-1>, {dim}, {dim})
    A = torch.diag_embed({t})
    A = {t}.unfold({dim}, {k}, {k})
    A = F.unfold({image}, {k}, padding=<0|1>)
    A = F.pad({t}, <(1, 2)|(1, 0, 2, 1)|(-1, 0)|(0, 0)>, value=<{n}|None>)
    A = F.pad({t}, <(1, 1)|(1, 0, 1, 1)>, mode=<'reflect'|'replicate'|'circular'>)
    A = torch.<cat|stack|hstack|vstack|dstack|concat|column_stack>([{t}, {s}])
    A = torch.<cat|stack>([{t}, {t}, {t}], {dim})
    A = torch.cat([{t}, {a}], <0|-1>)
    A = {t}.<chunk|split|tensor_split|unsafe_chunk|unsafe_split>(<1|2|3>, {dim})
    A = {t}.tensor_split(<[1]|[1, 2]|[-1]|[0, 0]|(2, 1)>, {dim})
    A = {t}.split([1, {last} - 1], <-1|{dim}>)
    A = {t}.unbind({dim})
    A = torch.meshgrid({t}, {t}, indexing='ij')
    A = torch.broadcast_tensors({t}, {s})
    A = torch.<topk>({t}, {k}, {dim}, {bool})
    A = torch.<sort|argsort>({t}, dim={dim}, descending={bool})
    A = torch.<argmax|argmin>({t}, {dim}, {bool})
    A = torch.<kthvalue>({t}, {k}, {dim})
    A = F.<dropout|dropout2d|alpha_dropout>({t}, <0.5|0.1|1.0|0.0>, {bool})
    A = torch.<zeros_like|ones_like>({a})
    A = torch.full_like({a}, {n})
    A = {t}.<new_zeros|new_ones>(<(2, 3)|()|(0,)>)
    A = {t}.new_full((2, 3), {n})
    A = {t} + torch.<zeros|ones>({lastsize})
    A = {t} * torch.full((1,), {n})
    A = {t} + torch.arange({last})
    A = torch.arange(<0|1|-2|2.5>, <5|7.5|100>, <1|2|0.5>).to(<{dtype}|torch.float16>)
    A = {t} * torch.arange({last}).flip(0)
    A = torch.linspace({n}, {n}, 5) * 2
    A = {t} * torch.tensor(<2.0|-3.0|6e4|[1.5]|7|True>)
    A = torch.scalar_tensor({n}) + {t}
    A = {t}.<scatter|scatter_add>({dim}, {indices_like}, {s})
    A = {t}.scatter({dim}, {indices_like}, {n}, reduce=<'add'|'multiply'>)
    A = {t}.index_add({dim}, {indices1}, {t}, alpha={n})
    A = {t}.index_fill({dim}, {indices1}, {n})
    A = {t}.index_put(({indices1},), torch.tensor({n}), accumulate={bool})
    A = torch.select_scatter({t}, {s}, {dim}, 0)
    A = F.<mse_loss|l1_loss|smooth_l1_loss|huber_loss>({t}, {s}, reduction=<'none'|'mean'|'sum'>)
    A = torch.cdist({m}, {m})
    A = torch.outer({t}, {t})
    A = torch.cross({t}, {s})
    A = torch.diff({t}, dim={dim})
    A = torch.trapezoid({t}, dim={dim})
    A = torch.renorm({m}, 2, 0, 1.0)
    A = {t}.to({dtype})
    A = {t}.to({dtype}).to(torch.float32)
    A = {t}.<half|bfloat16|float|double|int|long|bool|short|char|byte>()
    A = {t}.<half|bfloat16>().float()
    A = {t} * {t}.<bool|int|sign|isfinite>()
    A = ({t} > {n}) * {t}
    A = {a}.view(<torch.int32|torch.int16|torch.float32|torch.uint8|torch.int8>)
    A = {t}.logical_<not|and|or>({s})
    A = torch.fft.rfft({t}.float(), dim={dim}).abs()
    A = torch.view_as_real(torch.fft.fft({t}.float()))
""")

# weights that are cast; whole numbers in their own arithmetic
INTEGERS = _lines("""
    A = {t} * {w}.<bool|int|half|bfloat16|long|to(torch.int8)|to(torch.uint8)|short|sign>()
    A = {t} * {w}.<half|bfloat16|double>().float()
    A = {t} / ({w}.<int|bool|long|half>() + <1e-4|1e-2|1|0.5>)
    A = <1|{n}> / {w}.<half|bfloat16>().float()
    A = {t} / ({w}.abs() + {n}).<half|bfloat16|int>().float()
    A = {t} * {w}.to({dtype}).to(torch.float32)
    A = {t} - {w}.<floor|ceil|round|half|bool>()
    A = ({w} > {n}) * {t}
    A = {i} + {i}
    A = {i} * {s}
    A = {i} - {i} * <3|100|255>
    A = {i} * {i}
    A = <~{i}|-{i}|{i}.abs()|{i}.sign()|{i} ** 2|{i} ** 3>
    A = {i} + <1|100|200|-5|2147483647>
    A = <1|0|-1|200> - {i}
    A = {i} * <2|-1|100|255|65536>
    A = {i} // <2|-2|{n}|3>
    A = {i} % <2|-3|7>
    A = {i} / <2|{n}|3>
    A = torch.bitwise_left_shift({i}, <1|4|7>)
    A = torch.bitwise_right_shift({i}, <1|4>)
    A = {i} & <1|15|255>
    A = {i} ^ <1|255|-1>
    A = {i}.bitwise_not().to({dtype})
    A = {i}.to({dtype})
    A = {i}.<float|half|bool|byte|char|short|int|long>()
    A = {i}.float() * {t}
    A = {i}.<sum|prod|cumsum(0)|amax|amin|max|min|square|abs|neg|reciprocal|sqrt|exp|sigmoid>()
    A = {i}.sum({dim}, dtype=<torch.int8|torch.uint8|torch.int32|torch.float32|None>)
    A = {i}.<clamp(-1, 3)|clamp(0)|clamp_min(2)|relu()>
    A = torch.where({i} > 2, {i}, {n})
    A = torch.add({i}, {i}, alpha=<2|-3|100>)
    A = {i}.masked_fill({i} > 3, <7|-7|300>)
    A = torch.full_like({i}, <3|-3|300|2.7>)
    A = {i} @ {i}
    A = {i}.view(<torch.int8|torch.uint8|torch.float32|torch.bool|torch.int16>)
    A = {t}.view(torch.<int32|int16|uint8|int8>) * <1|1.0|2>
    A = {t}.<argmax|argmin|argsort|count_nonzero>({dim}) * {n}
    A = torch.<max|min|topk|sort>({t}, <1|2|0|-1>); B = A[1] * <1.0|{n}>
    A = F.max_pool<1|2>d({t}, 2, return_indices=True); B = A[1] + {n}
    A = F.adaptive_max_pool<1|2>d({t}, 2, return_indices=True); B = A[1] * {n}
    A = torch.aminmax({t}, dim={dim}); B = A[0] - A[1]
    A = ({t} * 100).to(<torch.uint8|torch.int8|torch.int16>); B = A + A
    A = {t}.<round|floor|trunc>().to(<torch.int8|torch.uint8|torch.int16|torch.int32>); B = A * <A|3|100>
    A = {t}.<bool|isnan|isinf|signbit>(); B = A + A
    A = ({t} > {n}); B = A * <A|{n}|-1>
    A = ({t} > {n}); B = <A.int() - 2|~A|A.float() * {n}|A.sum()|A.cumsum(0)|A ^ A.logical_not()>
    A = torch.bucketize({t}, torch.tensor([-1.0, 0.0, 1.0]))
    A = torch.arange(<5|300>).to(torch.<uint8|int8|int16>) * <3|200|-1>
    A = {t}.numel() * {t}
    A = {t} * {t}.shape.numel()
""")

# what looks like a softmax, a norm or a variance, correct and with one part or another changed
LOOKALIKES = _lines("""
    A = {t}; B = <A|A|A|A * {n}|A.relu()|A.float()|A[:1]>; G = <B.amax({d}, {keep})|torch.amax(B, {d}, \
        {keep})|B.max({d}, {keep}).values|torch.max(B, {d}, {keep})[0]|B.max()|B.amax()|B.amin({d}, \
        {keep})|B.logsumexp({d}, {keep})|B.mean({d}, {keep})>; C = <A - G|A - G|A - G|torch.sub(A, G, \
        alpha={n})|torch.rsub(G, A)|torch.rsub(A, G)|torch.rsub(G, A, alpha={n})|G - A|A + -G|\
        A - G * {n}|A - G.detach()|A - G.half().float()>; D = C.exp()
    A = {t}; G = A.amax({d}, {keep}); C = A - G; D = <C.exp()|torch.exp(C)|(C * {n}).exp()|C.exp2()|\
        C.expm1()>; E = D / <D.sum({d}, {keep})|D.sum({d}, {keep})|D.sum({dim}, {keep})|D.mean({d}, \
        {keep})|(D.sum({d}, {keep}) + {eps})>; H = E.<sum|amax|mean>({d})
    A = {t}; G = <A[:, :1]|A[:1]|A[..., :2]|A.flip(0)|A.roll(1, 0)>.amax({d}, {keep}); C = A - G; \
        D = C.exp()
    A = {m}; G = A.mT.amax({d}, {keep}); C = A - G; D = C.exp()
    A = {t}; G = A.amax({d}); C = A - G; D = C.exp()
    A = {t}; G = A.amax({d}, \
        True).<expand_as(A)|squeeze({d}).unsqueeze({d})|squeeze()|reshape(-1)[0]|contiguous()|clone()>; \
        C = A - G; D = C.exp()
    A = {t}; G = A.amax({d}, True); A.mul_(<2|-1|1>); C = A - G; D = C.exp()
    A = {t}; B = <A|A|A.float()|A * 2>; G = <B.pow(2)|B.square()|B * B|B ** 2|B.pow(3)|B.abs()|\
        A.pow(2)|B * A>; H = <G.mean({d}, {keep})|G.mean({d}, {keep})|G.mean(<[-1]|[{d}]|{dims}>, \
        {keep})|G.sum({d}, {keep})|G.mean()|G.amax({d}, {keep})|G[:1].mean({d}, {keep})|G.mT.mean({d}, \
        {keep})|torch.mean(G, {d}, {keep}, dtype=torch.float32)>; C = <H + {eps}|H + {eps}|torch.add(H, \
        {eps})|torch.add(H, 1.0, alpha={eps})|{eps} + H|H - {eps}|H * 1e-3 + {eps}|torch.clamp(H, \
        min={eps})>; D = <torch.rsqrt(C)|torch.rsqrt(C)|1 / C.sqrt()|C.rsqrt() + {eps}|C.rsqrt() * {n}|\
        C.reciprocal()|C.pow(-0.5)>; E = <B * D|A * D|D * A|A * D.to(A.dtype)|A[:1] * D|A.mT * D|\
        A * D[:1]|A * A * D>
    A = {t}; B = A.pow(2).mean(-1, keepdim=True); C = torch.rsqrt(B + {eps}); D = A * C; E = D * {w}
    A = {t}.float(); B = A.pow(2).mean(-1, keepdim=True); C = A * torch.rsqrt(B + {eps}); \
        D = C.to(<torch.float16|torch.bfloat16|torch.float32>); E = D * {w}
    A = {t}; B = <A.chunk(2, -1)|A.chunk(2, 0)|A.split(1, 0)|A.unbind(0)>; \
        C = B[0] * torch.rsqrt(B[-1].float().pow(2).mean(<-1|0>, {keep}) + {eps})
    A = {m}.float(); C = A.<mT|flip(0)|roll(1, -1)|transpose(0, \
        1)|reshape(-1)> * torch.rsqrt(A.pow(2).mean({d}, {keep}) + {eps})
    A = {t}; B = A.float(); C = (B.pow(2).mean({d}, {keep}) + {eps}); D = A / C.sqrt()
    A = {t}; B = A / (A.norm(dim={d}, keepdim={keep}) + {eps})
    A = {t}; B = A / A.norm(dim={d}, keepdim={keep}).clamp(min={eps})
    A = {t}; B = A.<sum|mean|abs().sum|pow(2).sum>({d}, {keep}); C = A / (B + {eps})
    A = {t}; B = A.mean({d}, {keep}); C = <A - B|A - B|B - A|A - B * {n}|A + B|A.relu() - B|\
        torch.sub(A, B, alpha={n})>; D = <C.pow(2).mean({d}, {keep})|C.square().mean({d}, {keep})|\
        (C * C).mean({d}, {keep})|A.var({d}, keepdim={keep})|A.var({d}, correction=<0|0|1|2>, \
        keepdim={keep})|C.abs().mean({d}, {keep})|A.pow(2).mean({d}, {keep})>; \
        E = <C / (D + {eps}).sqrt()|C * torch.rsqrt(D + {eps})|C / (D.sqrt() + {eps})|C / D.sqrt()|\
        C * D|C / D>
    A = {t}.float(); B = A.mean(-1, keepdim=True); C = (A - B).pow(2).mean(-1, keepdim=True); \
        D = (A - B) / torch.sqrt(C + {eps}); E = D * {w} + {w}
    A = {t}.float(); B = A.pow(2).mean({d}, {keep}) - A.mean({d}, {keep}).pow(2); C = <B.sqrt()|\
        (B + {eps}).sqrt()|torch.rsqrt(B + {eps})|B.clamp(min=0).sqrt()>
    A = {t}; B = A.std({d}, keepdim={keep}); C = (A - A.mean({d}, keepdim={keep})) / (B + {eps})
    A = {t}; B = <A.amax({d}, {keep})|A.abs().amax({d}, {keep})|A.norm()|A.sum()>; C = A / <B|\
        (B + {eps})|B.clamp(min={eps})>
    A = {t}; B = A.sigmoid(); C = <A * B|B * (1 - B)|A * (1 - B)|(1 - B).log()|B.log()|B / (1 - B)>
    A = {t}; B = A.exp(); C = <B / (1 + B)|B / B.sum({d}, {keep})|(1 + B).log()|B - 1|B / (B + {eps})>
    A = {t}; B = <A.relu()|A.abs()|A.square()|A.exp()|F.softplus(A)>; C = <1 / (B + {eps})|\
        A / (B + {eps})|(B + {eps}).rsqrt()|(B + {eps}).log()|B.sqrt()|B.log1p()>
    A = {t}; B = <A - A|A / A|A * A|A + A|A * A * A|torch.maximum(A, A)|A * -A|A - A.detach()|\
        A.pow(A)|torch.where(torch.gt(A, 0), A, A)>
    A = {t}; B = A.softmax({d}); C = <B.log()|B * A|B.sum({dim}, {keep})|B.mT.sum(-1)|B.sqrt()|\
        B @ B.mT|B.norm(dim={d})|B.cumsum({d})|1 / B>
    A = {t}; B = F.layer_norm(A, {trailing}, eps={eps}); C = <B.sum(-1)|B.norm(dim=-1)|\
        B.mT.norm(dim=-1)|B.reshape(-1).norm()|B @ B.mT|B.mean(-1)|B.pow(2).sum(-1)|\
        B.view({shape}).norm(dim=-1)|B.repeat(2, 1, 1).norm(dim=1)|B.flip(0).norm(dim=-1)>
    A = {t}; B = F.layer_norm(A, {trailing}, eps={eps}); C = F.linear(<B|B.mT|B[..., :2]|torch.cat([B, \
        B], -1)|B.flatten(-2)|B.flatten(0, 1)|B.unsqueeze(-1)|B.repeat_interleave(2, -1)>, {matrix})
    A = F.normalize({t}, dim={d}); B = <A.sum({d})|A @ A.mT|A.norm(dim={dim})|A.sum()>
""")

# values that are written in place, through other names, or by what no schema tells
IN_PLACE = _lines("""
    A = {t} * 1; B = {view}; B.{write}; C = A <+|*> 1
    A = {t} * 1; B = {view}; C = B <+|*> 1; A.{write}; D = B + 1
    A = {t} * 1; B = {view}; A.{write}; C = B <+|*> 1; D = A * 2
    A = {t} * 1; B = {view}; C = {view}; B.{write}; D = C * 1; E = A * 1
    A = {t}.clone(); A[{slice}].{write}; B = A + 1
    A = {t}.clone(); A[{slice}] = <{n}|{s}|A[{slice}]>; B = A * 1
    A = {t} * 1; A[..., <0|1:|:1|-1>] = <{n}|{s}>; B = A.sum()
    A = {t}; A.{write}; B = A + 1
    A = {w}; A.{write}; B = A * {t}
    A = <torch.empty_like({t})|{t}.new_empty({lastsize})|torch.empty({lastsize})|\
        aten.empty_like.default({t})>; B = A * <0|1|2>
    A = torch.empty({lastsize}); A.<fill_({n})|zero_()|copy_({s})|normal_()|uniform_(-1, 1)>; B = A + {t}
    A = <torch.empty_like({t})|torch.zeros_like({t})|torch.empty({lastsize})>; \
        torch.<add|mul|sub|maximum|div>({t}, {s}, out=A); B = A * 1
    A = {t} * 1; torch.<exp|neg|abs|sigmoid|tanh|sqrt>({t}, out=<A|A[{slice}]|A.view(-1)>); B = A + 1
    A = {t} * 1; B = torch.<relu_|sigmoid_|tanh_|exp_|neg_|abs_|sqrt_>(A); C = <A|B> * 2
    A = {t} * 1; B = F.<relu|leaky_relu|elu|celu|hardtanh|relu6|silu|mish|hardswish>(A, inplace=True); \
        C = A * 1
    A = {t} * 1; A += <{n}|{s}>; A *= <{n}|{s}>; B = A + 1
    A = {t} * 1; B = A; B -= {n}; C = A / 2
    A = {t} * 1; A.index_put_(({indices1},), torch.tensor({n}).to(A.dtype), accumulate={bool}); B = A + 1
    A = {t} * 1; A.<index_fill_({dim}, {indices1}, {n})|scatter_({dim}, {indices_like}, \
        {n})|index_add_({dim}, {indices1}, A, alpha={n})|masked_fill_(torch.gt(A, 0), \
        {n})|index_copy_({dim}, {indices1}, A)>; B = A * 1
    A = {t} * 1; \
        A.<copy_({s})|fill_({n})|zero_()|fill_diagonal_({n})|tril_()|triu_()|clamp_({n})|addcmul_({s}, \
        {s})|lerp_({s}, 2.0)|pow_(2)|fmod_(2)|cumsum_(0)|t_()|transpose_(0, \
        -1)|squeeze_()|unsqueeze_(0)|swapaxes_(0, \
        -1)|resize_as_(A)|erf_()|round_()|eq_(0)|gt_(0)|logical_not_()|detach_()>; B = A * 1
    E = {m}; A = {channels}; B = {variances}; C = F.batch_norm(E, A, B, training=True, \
        momentum=<0.1|1.0|0.5|None>); D = <A|B|(A + B)> * 1
    E = {image}; A = {channels}; B = {variances}; C = F.instance_norm(E, A, B, use_input_stats=True, \
        momentum=<0.1|1.0>); D = <A|B> * 1
    A = {image}; B = {channels} * 1; C = {variances} * 1; D = torch.nn.functional.batch_norm(A, B, C, \
        training=True, momentum=1.0); E = 1 / C; G = B + 1
    A = {image}; B = {channels} * 1; C = {variances} * 1; D = aten._native_batch_norm_legit.default(A, \
        None, None, B, C, True, 1.0, 1e-5); E = B + C
    A = {image}; B = {channels} * 1; C = {variances} * 1; D = aten.native_batch_norm.default(A, None, \
        None, B, C, True, 1.0, 1e-5); E = B + C
    A = {t} * 1; B = A.<expand(2, *A.shape)|unsqueeze(0)|view_as(A)>; A.{write}; C = B.sum(0)
    A = {t} * 1; B = A.<chunk(2)|split(1)|unbind()|tensor_split(2)>; B[0].{write}; C = A + 1
    A = {t} * 1; B = A.<chunk(2)|split(1)|unbind()>; A.{write}; C = B[0] + 1; D = B[-1] + 1
    A = {i} * 1; B = <A.view(-1)|A|A[:1]|A.t()>; B.<add_(100)|mul_(3)|neg_()|bitwise_not_()|fill_(7)>; \
        C = A * 1.0
    A = {t} * 1; B = A.view(torch.<int16|int32|uint8>); B.<zero_()|fill_(1)|bitwise_not_()|add_(1)>; \
        C = A * 1
    A = {t} * 1; B = torch.atleast_3d(A).add_({n}); C = A * 1
    A = {t} * 1; B = torch.broadcast_tensors(A, {s}); A.{write}; C = B[0] * 1
    A = {t} * 1; B = A.contiguous(); B.{write}; C = A * 1
    A = {t} * 1; B = A.to(<torch.float32|torch.float16|torch.bfloat16|A.dtype>); B.{write}; C = A * 1
    A = {t} * 1; B = F.dropout(A, 0.5, False); B.{write}; C = A * 1
    A = {t} * 1; B = torch.cat([A]); C = torch.stack([A, A]); A.{write}; D = B + 1; E = C + 1
    B = {t}; A = torch.zeros({lastsize}); A.copy_(B); A.{write}; C = A + B
    A = torch.zeros({lastsize}); A[{slice}] = 6e4; B = A + {t}
    A = torch.ones({lastsize}); A.{write}; B = A * {t}
    A = torch.full({lastsize}, 2.0); B = A.view(-1); B.{write}; C = A * {t}
    A = torch.arange({lastnumel}).float(); B = A[{slice}]; B.{write}; C = A * 1
""")

# what may share the memory of A
VIEWS = _lines("""
    torch.atleast_<1|2|3>d(A)
    A.view(-1)
    A.reshape(-1)
    A.flatten()
    A[{slice}]
    A.t()
    A.mT
    A.transpose(0, -1)
    A.unsqueeze(0)
    A.squeeze()
    A.expand(2, *A.shape)
    A.expand_as(A)
    A.detach()
    A.contiguous()
    A.to(A.dtype)
    A.float()
    A.positive()
    A.narrow(0, 0, 1)
    A.diagonal()
    A.chunk(2)[0]
    A.unbind()[0]
    A.split(1)[-1]
    A.unfold(0, 1, 1)
    torch.broadcast_tensors(A)[0]
    A.movedim(0, -1)
    A.swapaxes(0, -1)
    A.alias_copy()
    aten.alias.default(A)
    A.type_as(A)
    A.view_as(A)
    A.real
    torch.ravel(A)
    F.dropout(A, 0.3, False)
    A.select(-1, 0)
    A.clone()
    A
    A.permute(*range(A.ndim))
    A.unflatten(0, [1, -1])
    A.cpu()
    A.resolve_neg()
    A.reshape(A.shape)
    A.view(A.shape)
    A.as_strided(A.shape, A.stride())
    torch.moveaxis(A, 0, -1)
    A.tensor_split(2)[0]
    A.hsplit(1)[0]
    A.expand(A.shape)
    A.requires_grad_(False)
    A.squeeze(0)
""")

# methods that change a value in place
WRITES = _lines("""
    add_({n})
    mul_({n})
    sub_({s})
    copy_({s})
    fill_({n})
    zero_()
    clamp_({n}, None)
    masked_fill_({s} > 0, {n})
    relu_()
    neg_()
    exp_()
    add_({s}, alpha={n})
    mul_({s})
    div_({n})
    addcmul_({s}, {s}, value={n})
    square_()
    fill_(6e4)
    mul_(1e3)
    add_(3e4)
    abs_()
    sigmoid_()
    clamp_(min={n})
    index_fill_(0, torch.tensor([0]), {n})
    sub_({n})
""")
