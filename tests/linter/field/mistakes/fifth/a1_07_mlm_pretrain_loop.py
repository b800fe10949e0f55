# source: microsoft/Swin-Transformer issue #311
# mistake: unscale_ runs for every micro-batch although step/update run only once per accumulation window, so the second micro-batch raises "unscale_() has already been called on this optimizer"
# severity: error
import itertools
import random

import torch
from torch import nn

MASK_ID, PAD_ID = 4, 0

settings = {
    "hidden": 512,
    "layers": 8,
    "heads": 8,
    "vocab": 32000,
    "accumulate": 8,
    "clip": 1.0,
    "peak_lr": 5e-4,
    "updates": 50_000,
}


class MaskedLM(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.tok = nn.Embedding(s["vocab"], s["hidden"], padding_idx=PAD_ID)
        self.pos = nn.Embedding(512, s["hidden"])
        block = nn.TransformerEncoderLayer(
            s["hidden"], s["heads"], 4 * s["hidden"], activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, s["layers"], enable_nested_tensor=False)
        self.norm = nn.LayerNorm(s["hidden"])
        self.decode = nn.Linear(s["hidden"], s["vocab"])

    def forward(self, ids):
        where = torch.arange(ids.size(1), device=ids.device)
        h = self.tok(ids) + self.pos(where)
        h = self.blocks(h, src_key_padding_mask=ids.eq(PAD_ID))
        return self.decode(self.norm(h))


def corrupt(ids, rate=0.15):
    pick = torch.rand(ids.shape, device=ids.device).lt(rate) & ids.ne(PAD_ID)
    labels = ids.masked_fill(~pick, -100)
    return ids.masked_fill(pick, MASK_ID), labels


def pretrain(corpus_batches, s=settings, device="cuda"):
    random.seed(0)
    net = MaskedLM(s).to(device)
    optim = torch.optim.AdamW(net.parameters(), lr=s["peak_lr"], betas=(0.9, 0.98))
    warm = torch.optim.lr_scheduler.OneCycleLR(optim, s["peak_lr"], total_steps=s["updates"] + 1)
    grad_scaler = torch.amp.GradScaler()
    lossfn = nn.CrossEntropyLoss(ignore_index=-100)

    done = 0
    running = torch.zeros((), device=device)
    optim.zero_grad(set_to_none=True)
    for micro, ids in enumerate(itertools.cycle(corpus_batches), start=1):
        ids = ids.to(device, non_blocking=True)
        noisy, labels = corrupt(ids)
        with torch.autocast("cuda", dtype=torch.float16):
            pred = net(noisy)
            loss = lossfn(pred.view(-1, s["vocab"]), labels.view(-1))
        running += loss.detach()

        grad_scaler.scale(loss / s["accumulate"]).backward()
        grad_scaler.unscale_(optim)  # <- here
        nn.utils.clip_grad_norm_(net.parameters(), s["clip"])  # <- here

        if micro % s["accumulate"] == 0:
            grad_scaler.step(optim)
            grad_scaler.update()
            warm.step()
            optim.zero_grad(set_to_none=True)
            done += 1
            if done % 100 == 0:
                print(f"update {done}: {running.item() / (100 * s['accumulate']):.3f}")
                running.zero_()
        if done >= s["updates"]:
            break
    return net
