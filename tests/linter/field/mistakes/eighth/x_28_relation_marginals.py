# source: fastino-ai/GLiNER2 PR #155
# mistake: in float16 the bound 1 - 1e-6 rounds to 1, so a saturated probability reaches log1p(-1): minus infinity and NaN gradients
# severity: error
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast


class SpanPairScorer(nn.Module):
    """Scores entity spans and the relations between them."""

    def __init__(self, encoder, width, relations):
        super().__init__()
        self.encoder = encoder
        self.span = nn.Linear(2 * width, 1)
        self.left = nn.Linear(width, 256)
        self.right = nn.Linear(width, 256)
        self.pair = nn.Linear(512, relations)

    def forward(self, tokens, spans):
        h = self.encoder(**tokens).last_hidden_state
        idx = torch.arange(h.size(0), device=h.device)[:, None]
        a, b = h[idx, spans[..., 0]], h[idx, spans[..., 1]]
        span_logits = self.span(torch.cat([a, b], -1)).squeeze(-1)
        n = spans.size(1)
        l = self.left(a)[:, :, None].expand(-1, -1, n, -1)
        r = self.right(b)[:, None].expand(-1, n, -1, -1)
        return span_logits, self.pair(F.relu(torch.cat([l, r], -1)))


def agreement(span_logits, pair_logits):
    """A span that takes part in some relation should itself be an entity."""
    p_pair = torch.sigmoid(pair_logits)
    p_pair = p_pair.clamp(max=1.0 - 1e-6)  # <- here
    log_none = torch.log1p(-p_pair).sum(dim=(2, 3))  # <- here
    p_any = 1 - log_none.exp()
    return F.relu(p_any - torch.sigmoid(span_logits)).mean()


def objective(span_logits, pair_logits, batch, weight=0.1):
    span = F.binary_cross_entropy_with_logits(span_logits, batch["is_entity"])
    pair = F.binary_cross_entropy_with_logits(pair_logits, batch["relations"])
    return span + pair + weight * agreement(span_logits, pair_logits)  # <- here


def train(model, loader, epochs=5, lr=1e-5, device="cuda"):
    model.to(device).train()
    heads = [p for n, p in model.named_parameters() if not n.startswith("encoder.")]
    optimizer = torch.optim.AdamW(
        [{"params": model.encoder.parameters(), "lr": lr}, {"params": heads, "lr": 20 * lr}], weight_decay=0.01
    )
    scaler = GradScaler(device)
    for epoch in range(epochs):
        running = 0.0
        for batch in loader:
            tokens = {k: v.to(device) for k, v in batch["tokens"].items()}
            rest = {k: batch[k].to(device) for k in ("spans", "is_entity", "relations")}
            with autocast(device, dtype=torch.float16):
                span_logits, pair_logits = model(tokens, rest["spans"])
                loss = objective(span_logits, pair_logits, rest)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            running += loss.item()
        print(f"epoch {epoch + 1}: {running / len(loader):.4f}")
    torch.save(model.state_dict(), "relations.pt")
