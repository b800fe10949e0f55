# style of: huggingface/transformers:src/transformers/modeling_attn_mask_utils.py
# torch: any
import math
from typing import Optional

import torch
from torch import nn


def causal_bool_mask(length: int, device) -> torch.Tensor:
    """True where a query must not look."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def to_additive(blocked: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where attention is allowed, the dtype's lowest finite number elsewhere."""
    zeros = torch.zeros(blocked.shape, dtype=dtype, device=blocked.device)
    return zeros.masked_fill(blocked, torch.finfo(dtype).min)


def make_4d_mask(attention_mask: torch.Tensor, dtype: torch.dtype, causal: bool = True) -> torch.Tensor:
    # the booleans are combined first: two additive masks could sum below the lowest number
    blocked = attention_mask[:, None, None, :].eq(0)
    if causal:
        blocked = blocked | causal_bool_mask(attention_mask.size(1), attention_mask.device)
    return to_additive(blocked, dtype)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        assert width % heads == 0
        self.heads = heads
        self.head_dim = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, attention_mask: Optional[torch.Tensor] = None) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.head_dim)
        if attention_mask is not None:
            scores = scores + make_4d_mask(attention_mask, scores.dtype)
        # softmax in float32, back to the compute type for the product with the values
        probs = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
        out = torch.matmul(self.dropout(probs), v)
        return self.proj(out.transpose(1, 2).reshape(b, t, -1))


def masked_mean(hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    weights = attention_mask.unsqueeze(-1).float()
    return (hidden.float() * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


def max_pool(hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    hidden = hidden.masked_fill(attention_mask.unsqueeze(-1).eq(0), torch.finfo(hidden.dtype).min)
    return hidden.amax(dim=1)
