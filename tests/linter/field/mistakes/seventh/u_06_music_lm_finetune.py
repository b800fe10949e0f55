# source: https://github.com/QwenAudio/FunMusic/issues/28
# mistake: the trained weights themselves are cast to float16, so their gradients are float16 and scaler.unscale_ raises "Attempting to unscale FP16 gradients"
# severity: error
import argparse

import torch
import torch.nn.functional as F
from torch import nn


class TokenLM(nn.Module):
    def __init__(self, vocab=4096, dim=512, layers=8):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        block = nn.TransformerEncoderLayer(dim, 8, 4 * dim, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        n = tokens.size(1)
        causal = torch.ones(n, n, dtype=torch.bool, device=tokens.device).triu(1)
        return self.head(self.blocks(self.emb(tokens), mask=causal))


def load_pretrained(path, device, fp16):
    lm = TokenLM()
    lm.load_state_dict(torch.load(path, map_location="cpu"))
    lm = lm.to(device)
    if fp16:
        lm = lm.half()  # <- here
    return lm


def forward_loss(model, tokens, fp16):
    with torch.autocast("cuda", dtype=torch.float16, enabled=fp16):
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def update_parameters(model, optimizer, scheduler, scaler, max_norm):
    if scaler is not None:
        scaler.unscale_(optimizer)  # <- here
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
    else:
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    return float(norm)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--init", required=True)
    p.add_argument("--data", required=True)
    p.add_argument("--fp16", action="store_true")
    p.add_argument("--lr", type=float, default=1e-4)
    a = p.parse_args()

    model = load_pretrained(a.init, "cuda", a.fp16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
    scaler = torch.amp.GradScaler("cuda") if a.fp16 else None  # <- here

    for step, tokens in enumerate(torch.load(a.data)):
        loss = forward_loss(model, tokens.cuda(), a.fp16)
        if scaler is not None:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        norm = update_parameters(model, optimizer, scheduler, scaler, 5.0)
        if step % 50 == 0:
            print(step, loss.item(), norm)


if __name__ == "__main__":
    main()
