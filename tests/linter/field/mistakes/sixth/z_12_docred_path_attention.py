# source: NVIDIA/apex issue #1052
# mistake: fp16 attention scores are filled with -1e9, which float16 can't hold: masked_fill raises "value cannot be converted to type at::Half without overflow"
# severity: error
import math
import time

import torch
from torch import Tensor, nn

NEG = -1e9  # <- here


class PathAttention(nn.Module):
    def __init__(self, dim, heads=8):
        super().__init__()
        assert dim % heads == 0
        self.h, self.d = heads, dim // heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def _split(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        return x.view(b, n, self.h, self.d).transpose(1, 2)

    def forward(self, pairs: Tensor, paths: Tensor, path_mask: Tensor) -> Tensor:
        q, k, v = self._split(self.q(pairs)), self._split(self.k(paths)), self._split(self.v(paths))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.d)
        scores = scores.masked_fill(~path_mask[:, None, None, :], NEG)  # <- here
        ctx = torch.matmul(scores.softmax(dim=-1), v).transpose(1, 2).flatten(2)
        return self.o(ctx)


class RelationModel(nn.Module):
    def __init__(self, encoder, dim=768, relations=97):
        super().__init__()
        self.encoder = encoder
        self.attend = PathAttention(dim)
        self.classify = nn.Linear(2 * dim, relations)

    def forward(self, ids, attn, pair_pos, path_pos, path_mask):
        hid = self.encoder(input_ids=ids, attention_mask=attn).last_hidden_state
        pick = lambda pos: torch.gather(hid, 1, pos.unsqueeze(-1).expand(-1, -1, hid.size(-1)))
        pairs = pick(pair_pos)
        mixed = self.attend(pairs, pick(path_pos), path_mask)
        return self.classify(torch.cat([pairs, mixed], dim=-1))


def train(model, loader, epochs=30, lr=3e-5):
    model.cuda().train()
    optim = torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-6)
    scaler = torch.amp.GradScaler("cuda")
    crit = nn.BCEWithLogitsLoss()
    for ep in range(epochs):
        t0, tot = time.time(), 0.0
        for batch in loader:
            batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
            labels = batch.pop("labels")
            with torch.autocast(device_type="cuda", dtype=torch.float16):
                loss = crit(model(**batch), labels)
            optim.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(optim)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optim)
            scaler.update()
            tot += loss.item()
        print(f"epoch {ep} loss {tot / len(loader):.4f} ({time.time() - t0:.0f}s)")
