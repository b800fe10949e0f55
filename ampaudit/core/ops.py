"""The catalogue of ops: what each ATen op does, for the checks, advice, bounds and runs that ask.

Names leave out the overload, and the in-place suffix unless only the in-place op has the trait.
"""

from __future__ import annotations

from functools import cache

# an entry is the name of a trait, a colon, and its ops; a comment says what the ops below it have in common
_CATALOGUE = """
# The result holds elements of the inputs, or zero: nothing overflows or is rounded.
selects: relu relu_ relu6 max_pool1d max_pool2d max_pool3d max_pool2d_with_indices adaptive_max_pool1d
    adaptive_max_pool2d clone contiguous cat concat stack hstack vstack repeat repeat_interleave tile
    flip roll index_select gather take_along_dim masked_select index pixel_shuffle pixel_unshuffle rot90
    sort topk tril triu _unsafe_index lift_fresh_copy channel_shuffle

# The result equals the input.
identity: alias clone contiguous detach lift_fresh

# The result equals the input, except in training.
dropout: alpha_dropout dropout feature_dropout

# Only the elements of the first argument that the result holds are read.
gathers: embedding gather index index_select take take_along_dim

# The memory of the result is not initialized.
uninitialized: empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize_

# Memory is allocated, resized, filled or copied, and nothing else.
memory: as_strided_ copy_ empty empty_like empty_strided fill_ full full_like masked_fill_ new_empty
    new_empty_strided new_full new_zeros ones ones_like resize_ resize_as_ set_ squeeze_ unsqueeze_ zero_
    zeros zeros_like

# The result holds one number.
zeros: new_zeros zeros zeros_like
constant: full full_like new_full scalar_tensor

# Some elements are replaced by one number.
fills: fill index_fill masked_fill where

# f(c x) = c f(x) for every power of two c; other operands select elements, or do not affect the result.
linear: neg relu leaky_relu abs sum mean cumsum roll flip repeat repeat_interleave tile index_select gather
    index amax amin dropout feature_dropout avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    upsample_nearest1d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d pixel_shuffle
    pixel_unshuffle masked_select take_along_dim tril triu clone contiguous to _to_copy type_as
    constant_pad_nd lift_fresh_copy channel_shuffle embedding scaled_dot_product_attention std

# f(c x, c y) = c f(x, y) for every power of two c.
additive: add sub rsub cat concat stack hstack vstack maximum minimum where masked_fill index_put scatter copy
    slice_scatter select_scatter masked_scatter lerp

# The result is computed from its inputs, element by element or by index.
arithmetic: add addcdiv addcmul copy div index_add lerp mul pow scatter_add sub

# The sum or difference of two values.
sum_of_two: add rsub sub

# Products of two values, usually activations, are added up.
product: bmm dot einsum matmul mm mv vdot
added_product: addbmm baddbmm

# Products of a value and a weight are added up.
weighted: _convolution addmm addmv conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
    conv_transpose3d convolution linear

# Elements of one value are added up, or multiplied.
sum: cumsum mean nansum sum
total: cumsum index_add logcumsumexp mean nansum scatter_add segment_reduce sum sum_to_size trace
factors: cumprod prod

# Squares of elements or of differences are added up.
squares: _euclidean_dist cdist cosine_similarity dist frobenius_norm linalg_vector_norm mse_loss norm std
    std_mean var var_mean

# The input is divided by a norm of itself.
normalizes: _fused_rms_norm batch_norm group_norm instance_norm layer_norm native_layer_norm rms_norm
softmax: _log_softmax _softmax log_softmax softmax

# Values that grow fast, have a pole, or oscillate.
exponential: cosh exp exp2 expm1 logaddexp pow sinh
logarithm: log log10 log1p log2
wave: cos polar sin tan
infinite_at_zero: div floor_divide fmod log log10 log2 logit pow reciprocal remainder rsqrt

# The result lies between limits, or some large inputs give the same result.
clamps: clamp clamp_max clamp_min clip hardtanh
extremum_of_two: maximum minimum
saturates: hardsigmoid hardswish nan_to_num relu6 sigmoid tanh

# The result follows from comparing elements: it is a truth value, a position, or some of the elements.
compares: eq ge greater greater_equal gt le less less_equal lt ne not_equal
index_of_extreme: argmax argmin argsort
extreme: amax amin
orders: cummax cummin kthvalue max median min mode sort topk

# The result depends only on the sign of each element, or on whether it is finite, infinite or NaN.
kind_of_number: isfinite isinf isnan isneginf isposinf sign

# The result is a whole number.
whole_number: ceil fix floor floor_divide heaviside round sign trunc

# The derivative is not continuous: rounding a value across an edge changes its gradient entirely.
piecewise: relu relu_ relu6 leaky_relu prelu rrelu threshold hardtanh hardswish hardsigmoid hardshrink
    softshrink clamp clamp_min clamp_max abs maximum minimum fmax fmin max min amax amin sort topk median
    max_pool1d max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d l1_loss hinge_embedding_loss margin_ranking_loss

# Composite ops that end in one kernel: auditing their parts would show nothing more.
one_kernel: adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d avg_pool1d
    batch_norm chunk clip clip_ concat concatenate conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d ctc_loss diag divide divide_ dropout dropout_ einsum embedding_bag
    expand_as feature_dropout flatten greater greater_equal grid_sampler group_norm gru_cell layer_norm
    less less_equal linear log_sigmoid log_softmax lstm_cell matmul max max_pool1d max_pool2d max_pool3d
    meshgrid min moveaxis movedim multiply multiply_ narrow negative nll_loss nll_loss2d not_equal
    one_hot outer pad positive prelu relu6 relu6_ repeat_interleave reshape reshape_as rms_norm
    rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention selu selu_ softmax split square squeeze
    stack std std_mean subtract subtract_ swapaxes swapdims t take_along_dim tensor_split tile to
    true_divide true_divide_ type_as unflatten unsafe_chunk var var_mean view_as where contiguous
    broadcast_tensors broadcast_to atleast_1d atleast_2d atleast_3d hstack vstack dstack column_stack
    item size dim numel is_floating_point is_complex is_nonzero conj resolve_conj resolve_neg real imag
    mT mH adjoint matrix_H numpy_T data requires_grad_ result_type promote_types isfinite isreal isclose
    argsort argwhere sum_to_size fill_diagonal_ cdist stft istft lift_fresh arctan2 absolute fix convolution
    _convolution

# Ops among those above whose parts nevertheless round several times on every device.
rounds_inside: cdist einsum gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell

# Composite ops among those above whose derivative is a formula of several ops, each of which rounds.
derived_by_parts: binary_cross_entropy_with_logits divide divide_ einsum max min multiply multiply_ outer
    square std std_mean true_divide true_divide_ var var_mean

# On CUDA the derivative is one kernel, although a CPU may call several ops.
derived_in_one_kernel: _fused_rms_norm _thnn_fused_gru_cell _thnn_fused_lstm_cell native_batch_norm
    native_group_norm native_layer_norm

# The kernel of the derivative computes in the tensor's own type on every device.
derived_in_own_type: binary_cross_entropy_backward huber_loss_backward mse_loss_backward
    smooth_l1_loss_backward

# The result has the shape of the first argument and does not depend on its values.
reads_shape: empty_like full_like new_empty new_empty_strided new_full new_ones new_zeros ones_like rand_like
    randint_like randn_like zeros_like

# The kernel computes in the tensor's own type on every device, or reads its bits or its limits.
own_type: _index_put_impl_ addr addr_ cross floor_divide floor_divide_ index_put index_put_ linalg_cross
    nan_to_num nan_to_num_ nextafter nextafter_ put put_ segment_reduce

# CPU and CUDA share a function that calls several ops, each of which rounds.
shared_function: addbmm addbmm_ huber_loss linalg_matrix_exp mse_loss smooth_l1_loss

# CUDA kernels read Python numbers in the tensor's own type (scalar_t, not opmath_t).
number_in_own_type: copysign eq fmod ge greater greater_equal group_norm gt hardshrink hardshrink_backward
    isin le less less_equal lt native_group_norm ne not_equal pow remainder softshrink softshrink_backward
    special_xlog1py special_xlogy threshold threshold_backward xlogy

# LAPACK, MAGMA and cuSOLVER have neither float16 nor bfloat16; of linalg_*, only a few have a kernel.
# Other kernels are compiled for float32 and float64 alone, on every device.
no_16_bit_kernel: cdist cholesky cholesky_inverse cholesky_solve ctc_loss det geqrf inverse logdet lu_solve
    ormqr pdist pinverse polar qr slogdet special_airy_ai special_bessel_j0 special_bessel_j1
    special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_erfcx special_hermite_polynomial_h
    special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p
    special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
    special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
    special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_zeta svd triangular_solve
no_16_bit_kernel_on_cuda: histc
linalg_in_16_bits: linalg_cross linalg_diagonal linalg_matmul linalg_norm linalg_vecdot linalg_vector_norm
"""


def _parsed(text: str) -> dict[str, frozenset[str]]:
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    entries = "\n".join(lines).replace("\n    ", " ").splitlines()
    pairs = (entry.partition(":") for entry in entries if entry)
    return {trait: frozenset(ops.split()) for trait, _, ops in pairs}


_OPS = _parsed(_CATALOGUE)


@cache
def having(*traits: str) -> frozenset[str]:
    """Return the ops that have at least one of these traits."""
    return frozenset().union(*(_OPS[trait] for trait in traits))
