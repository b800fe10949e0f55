# source: https://github.com/fastino-ai/GLiNER2/pull/155
# mistake: probabilities are bfloat16 and clamped at 1 - 1e-6, which rounds to exactly 1 there, so log1p(-p) can be -inf and its gradient NaN.
# severity: error
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import AutoModel, get_linear_schedule_with_warmup


@dataclass
class Config:
    encoder: str = "microsoft/deberta-v3-base"
    types: int = 12
    width: int = 8
    lr: float = 2e-5
    head_lr: float = 1e-4
    consistency: float = 0.1
    warmup: int = 300
    steps: int = 10000


class SpanTagger(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(cfg.encoder, torch_dtype=torch.float32)
        d = self.encoder.config.hidden_size
        self.start = nn.Linear(d, cfg.types)
        self.span = nn.Sequential(nn.Linear(2 * d, d), nn.GELU(), nn.Linear(d, cfg.types))
        self.width = cfg.width

    def forward(self, ids, mask):
        h = self.encoder(ids, attention_mask=mask).last_hidden_state
        starts = self.start(h)
        cols = []
        for w in range(self.width):
            ends = torch.roll(h, -w, dims=1)
            cols.append(self.span(torch.cat([h, ends], dim=-1)))
        return starts, torch.stack(cols, dim=2)


def consistency_loss(starts, spans, mask):
    """P(token starts an entity) should equal 1 - prod(1 - P(span)) over the widths."""
    p_start = torch.sigmoid(starts)
    p_span = torch.sigmoid(spans)
    p_span = p_span.clamp(max=1.0 - 1e-6)  # <- here
    none = torch.log1p(-p_span).sum(dim=2)  # <- here
    implied = 1 - torch.exp(none)
    diff = (p_start.float() - implied.float()).pow(2).mean(-1)
    return (diff * mask).sum() / mask.sum()


def span_loss(starts, spans, gold_starts, gold_spans, mask):
    a = F.binary_cross_entropy_with_logits(starts.float(), gold_starts, reduction="none").mean(-1)
    b = F.binary_cross_entropy_with_logits(spans.float(), gold_spans, reduction="none").mean((-1, -2))
    return ((a + b) * mask).sum() / mask.sum()


def train(loader, cfg=Config()):
    model = SpanTagger(cfg).cuda()
    heads = list(model.start.parameters()) + list(model.span.parameters())
    optimizer = torch.optim.AdamW([{"params": model.encoder.parameters(), "lr": cfg.lr},
                                   {"params": heads, "lr": cfg.head_lr}], weight_decay=0.01)
    plan = get_linear_schedule_with_warmup(optimizer, cfg.warmup, cfg.steps)
    model.train()
    step = 0
    while step < cfg.steps:
        for batch in loader:
            ids, mask, gold_starts, gold_spans = (t.cuda(non_blocking=True) for t in batch)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                starts, spans = model(ids, mask)  # <- here
            loss = span_loss(starts, spans, gold_starts, gold_spans, mask)
            loss = loss + cfg.consistency * consistency_loss(starts, spans, mask)  # <- here
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            plan.step()
            step += 1
            if step % 50 == 0:
                print(step, round(loss.item(), 4))
            if step >= cfg.steps:
                break
    return model
