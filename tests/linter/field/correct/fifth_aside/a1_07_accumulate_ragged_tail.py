# why correct: every accumulation window, also the short last one, divides by its own size, unscales once, steps and updates once
import torch
from torch import nn


def windows(loader, size):
    block = []
    for item in loader:
        block.append(item)
        if len(block) == size:
            yield block
            block = []
    if block:
        yield block


def to_device(batch, device):
    return {k: v.to(device, non_blocking=True) for k, v in batch.items()}


class Translator:
    def __init__(self, model, lr=5e-4, accumulate=6, clip=1.0, fp16=True):
        self.model = model.cuda()
        self.accumulate = accumulate
        self.clip = clip
        self.fp16 = fp16
        self.opt = torch.optim.Adam(self.model.parameters(), lr=lr, betas=(0.9, 0.98), eps=1e-9)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**13, growth_interval=500, enabled=fp16)
        self.crit = nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.1)

    def micro_loss(self, batch):
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.fp16):
            logits = self.model(batch["src"], batch["tgt_in"])
            return self.crit(logits.flatten(0, 1), batch["tgt_out"].flatten())

    def train_window(self, block):
        self.opt.zero_grad(set_to_none=True)
        seen = 0.0
        for batch in block:
            loss = self.micro_loss(to_device(batch, "cuda")) / len(block)
            self.scaler.scale(loss).backward()
            seen += loss.detach()
        self.scaler.unscale_(self.opt)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.opt)
        self.scaler.update()
        return seen, norm

    def epoch(self, loader):
        self.model.train()
        for n, block in enumerate(windows(loader, self.accumulate)):
            loss, norm = self.train_window(block)
            if n % 50 == 0:
                print(f"{n:5d} loss {loss.item():.3f} norm {norm.item():.2f}")

    @torch.no_grad()
    def validate(self, loader):
        self.model.eval()
        losses = [self.micro_loss(to_device(b, "cuda")) for b in loader]
        return torch.stack(losses).mean().item()
