# why correct: when a spike is skipped scaler.update() is still called, so unscale_ may be called again in the next iteration
import math
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn


class SpikeGuard:
    def __init__(self, window=200, factor=8.0):
        self.norms = deque(maxlen=window)
        self.factor = factor

    def rejects(self, norm):
        if not math.isfinite(norm):
            return False
        if len(self.norms) < 50:
            self.norms.append(norm)
            return False
        typical = sorted(self.norms)[len(self.norms) // 2]
        if norm > self.factor * typical:
            return True
        self.norms.append(norm)
        return False


class ProteinTrainer:
    def __init__(self, model, lr):
        self.model = model.cuda()
        self.opt = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98))
        self.scaler = torch.amp.GradScaler("cuda")
        self.guard = SpikeGuard()
        self.skipped = 0

    def masked_loss(self, tokens, corrupted, where):
        with torch.autocast("cuda", dtype=torch.float16):
            logits = self.model(corrupted)
            return F.cross_entropy(logits[where], tokens[where])

    def apply(self):
        self.scaler.unscale_(self.opt)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item()
        if self.guard.rejects(norm):
            self.skipped += 1
        else:
            self.scaler.step(self.opt)
        self.scaler.update()
        return norm

    def train_batch(self, tokens, mask_id):
        where = torch.rand(tokens.shape, device=tokens.device) < 0.15
        where[:, 0] = True
        corrupted = tokens.masked_fill(where, mask_id)
        self.opt.zero_grad(set_to_none=True)
        loss = self.masked_loss(tokens, corrupted, where)
        self.scaler.scale(loss).backward()
        return loss.item(), self.apply()

    def fit(self, loader, mask_id):
        self.model.train()
        for i, tokens in enumerate(loader):
            loss, norm = self.train_batch(tokens.cuda(), mask_id)
            if i % 100 == 0:
                print(f"{i} loss {loss:.3f} norm {norm:.2f} skipped {self.skipped}")
