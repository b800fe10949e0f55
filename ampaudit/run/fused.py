"""Measures a pair of vectors on a CUDA device in one kernel, written in Triton.

With torch's own ops ``measure_any`` takes some fifty kernels for the same fields, each of which reads or
writes a whole tensor. Here each program of the kernel processes a part of both vectors, and the last one to
finish merges the parts in a fixed order, so that equal inputs give equal sums.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # elements that a program reads at once
_PROGRAMS = 256  # maximum: enough for every current GPU, and merged at once
_FIELDS = 9


def measure_fused(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the fields of ``measure_any`` for two contiguous, non-empty vectors on one device.

    Their dtypes may differ; the sums may differ from those of ``measure_any`` in their last bits.
    """
    elements = value.numel()
    row = torch.empty(_FIELDS, dtype=torch.float64, device=value.device)
    stream = torch.cuda.current_stream(value.device).cuda_stream if value.is_cuda else 0
    parts, finished = _scratch(value.device, stream)
    grid = (min(-(-elements // _BLOCK), _PROGRAMS),)
    _kernel[grid](reference, value, row, parts, finished, elements, block=_BLOCK, most=_PROGRAMS)
    return row


@cache
def _scratch(device: torch.device, stream: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the parts of all programs and their counter, for the kernels of one stream."""
    parts = torch.empty(_FIELDS * _PROGRAMS, dtype=torch.float64, device=device)
    return parts, torch.zeros((), dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["elements"])  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    reference, value, row, parts, finished, elements, block: tl.constexpr, most: tl.constexpr
):
    inf = float("inf")
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    ref_peak = tl.zeros((block,), tl.float64)
    peak = tl.zeros((block,), tl.float64)
    bad_ref_peak = tl.zeros((block,), tl.float64)
    err_sq = tl.zeros((block,), tl.float64)
    ref_sq = tl.zeros((block,), tl.float64)
    pos_inf = tl.zeros((block,), tl.int64)
    neg_inf = tl.zeros((block,), tl.int64)
    nan = tl.zeros((block,), tl.int64)
    ref_bad = tl.zeros((block,), tl.int64)
    for start in range(program.to(tl.int64) * block, elements, programs * block):
        at = start + tl.arange(0, block)
        r = tl.load(reference + at, mask=at < elements, other=0.0).to(tl.float64)
        v = tl.load(value + at, mask=at < elements, other=0.0).to(tl.float64)
        ref_finite = tl.abs(r) < inf
        finite = tl.abs(v) < inf
        clean = tl.where(ref_finite, r, 0.0)
        difference = tl.where(ref_finite & finite, v - clean, 0.0)
        paired = tl.where(finite, clean, 0.0)
        ref_peak = tl.maximum(ref_peak, tl.abs(clean))
        peak = tl.maximum(peak, tl.abs(tl.where(finite, v, 0.0)))
        bad_ref_peak = tl.maximum(bad_ref_peak, tl.abs(tl.where(finite, 0.0, clean)))
        err_sq += difference * difference
        ref_sq += paired * paired
        pos_inf += (ref_finite & (v == inf)).to(tl.int64)
        neg_inf += (ref_finite & (v == -inf)).to(tl.int64)
        nan += ((v != v) & (r == r)).to(tl.int64)
        ref_bad += (ref_finite == 0).to(tl.int64)
    here = parts + program
    tl.store(here, tl.max(ref_peak))
    tl.store(here + most, tl.max(peak))
    tl.store(here + 2 * most, tl.sum(pos_inf).to(tl.float64))
    tl.store(here + 3 * most, tl.sum(neg_inf).to(tl.float64))
    tl.store(here + 4 * most, tl.sum(nan).to(tl.float64))
    tl.store(here + 5 * most, tl.sum(err_sq))
    tl.store(here + 6 * most, tl.sum(ref_sq))
    tl.store(here + 7 * most, tl.max(bad_ref_peak))
    tl.store(here + 8 * most, tl.sum(ref_bad).to(tl.float64))
    tl.debug_barrier()
    if tl.atomic_add(finished, 1) == programs - 1:
        which = tl.arange(0, most)
        for field in tl.static_range(9):
            # bypass the first-level cache, which does not see the writes of other programs
            part = tl.load(
                parts + field * most + which, mask=which < programs, other=0.0, cache_modifier=".cg"
            )
            if field == 0 or field == 1 or field == 7:
                tl.store(row + field, tl.max(part))
            else:
                tl.store(row + field, tl.sum(part))
        tl.store(finished, 0)
