# why correct: the scaler is enabled for float16 only; for bfloat16 and float32 the same calls are pass-throughs, so clipping after unscale_ is right in all three modes
from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass(frozen=True)
class Precision:
    compute: Optional[torch.dtype]

    @classmethod
    def parse(cls, text):
        table = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
        if text == "auto":
            text = "bf16" if torch.cuda.is_bf16_supported() else "fp16"
        return cls(table[text])

    def context(self):
        return torch.autocast("cuda", dtype=self.compute or torch.bfloat16, enabled=self.compute is not None)

    def scaler(self):
        return torch.amp.GradScaler("cuda", enabled=self.compute is torch.float16)


class Summarizer(nn.Module):
    def __init__(self, vocab=32_000, dim=512):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.net = nn.Transformer(dim, 8, 4, 4, batch_first=True, norm_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, src, tgt):
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.size(1), device=tgt.device)
        return self.out(self.net(self.emb(src), self.emb(tgt), tgt_mask=causal, tgt_is_causal=True))


def optimize(model, batches, precision="auto", lr=3e-4, limit=1.0, resume=None):
    mode = Precision.parse(precision)
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    scaler = mode.scaler()
    if resume is not None:
        model.load_state_dict(resume["model"])
        opt.load_state_dict(resume["opt"])
        if scaler.is_enabled() and resume.get("scaler"):
            scaler.load_state_dict(resume["scaler"])
    model.cuda().train()
    for src, tgt in batches:
        src, tgt = src.cuda(), tgt.cuda()
        with mode.context():
            loss = F.cross_entropy(model(src, tgt[:, :-1]).flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=0)
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        scaler.step(opt)
        scaler.update()
    return {"model": model.state_dict(), "opt": opt.state_dict(), "scaler": scaler.state_dict()}
