# style of: triton-lang/triton:python/tutorials/06-fused-attention.py
# torch: 2.0+ with triton
import torch
import triton
import triton.language as tl


@triton.jit
def _masked_softmax_fwd(
    out_ptr, in_ptr, len_ptr, stride_row, n_cols, sm_scale, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    valid = tl.load(len_ptr + row)
    cols = tl.arange(0, BLOCK)
    keep = cols < valid
    # accumulate in float32, whatever the tensors hold; -1e9 is a float32 constant here
    scores = tl.load(in_ptr + row * stride_row + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    scores = tl.where(keep, scores * sm_scale, -1e9)
    scores = scores - tl.max(scores, axis=0)
    num = tl.where(keep, tl.exp(scores), 0.0)
    den = tl.sum(num, axis=0) + 1e-20
    tl.store(
        out_ptr + row * stride_row + cols,
        (num / den).to(out_ptr.dtype.element_ty),
        mask=cols < n_cols,
    )


def masked_softmax(x: torch.Tensor, lengths: torch.Tensor, sm_scale: float = 1.0) -> torch.Tensor:
    assert x.is_cuda and x.is_contiguous() and x.dim() == 2
    rows, cols = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(cols)
    _masked_softmax_fwd[(rows,)](out, x, lengths, x.stride(0), cols, sm_scale, BLOCK=block)
    return out


def reference(x, lengths, sm_scale=1.0):
    blocked = torch.arange(x.size(1), device=x.device)[None] >= lengths[:, None]
    scores = (x.float() * sm_scale).masked_fill(blocked, float("-inf"))
    return scores.softmax(-1).to(x.dtype)


def test_against_reference(dtype=torch.float16):
    torch.manual_seed(0)
    x = torch.randn(64, 300, device="cuda", dtype=dtype)
    lengths = torch.randint(1, 301, (64,), device="cuda", dtype=torch.int32)
    torch.testing.assert_close(masked_softmax(x, lengths, 0.5), reference(x, lengths, 0.5), atol=1e-3, rtol=1e-2)


if __name__ == "__main__":
    test_against_reference()
    print("ok")
