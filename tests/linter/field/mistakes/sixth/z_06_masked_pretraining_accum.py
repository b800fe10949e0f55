# source: microsoft/Swin-Transformer issue #311
# mistake: unscale_ runs on every micro batch while update() runs once per group, so the second micro batch raises "unscale_() has already been called"
# severity: error
import itertools
from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.cuda import amp

cfg = SimpleNamespace(
    TRAIN=SimpleNamespace(ACCUMULATION_STEPS=4, CLIP_GRAD=5.0, BASE_LR=1e-4, STEPS=100_000, PRINT=100),
    AMP=True,
    PATCH=32,
)


class MaskedAE(nn.Module):
    def __init__(self, dim=384, depth=8):
        super().__init__()
        self.embed = nn.Conv2d(3, dim, cfg.PATCH, cfg.PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        layer = nn.TransformerEncoderLayer(dim, 6, 4 * dim, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth)
        self.decoder = nn.Linear(dim, 3 * cfg.PATCH ** 2)

    def forward(self, img, mask):
        x = self.embed(img).flatten(2).transpose(1, 2)
        x = torch.where(mask.unsqueeze(-1), self.token.to(x.dtype), x)
        rec = self.decoder(self.blocks(x))
        tgt = nn.functional.unfold(img, cfg.PATCH, stride=cfg.PATCH).transpose(1, 2)
        err = (rec.float() - tgt).abs().mean(-1)
        return (err * mask).sum() / mask.sum().clamp(min=1)


def grad_norm_of(model):
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()


def train_steps(model, stream, optimizer, lr_scheduler, scaler):
    k = cfg.TRAIN.ACCUMULATION_STEPS
    optimizer.zero_grad()
    for idx, (img, mask) in enumerate(itertools.islice(stream, cfg.TRAIN.STEPS)):
        img, mask = img.cuda(non_blocking=True), mask.cuda(non_blocking=True)
        with amp.autocast(enabled=cfg.AMP):
            loss = model(img, mask)
        scaler.scale(loss / k).backward()
        scaler.unscale_(optimizer)  # <- here
        if cfg.TRAIN.CLIP_GRAD:
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.TRAIN.CLIP_GRAD)  # <- here
        else:
            grad_norm = grad_norm_of(model)
        if (idx + 1) % k == 0:  # <- here
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            lr_scheduler.step()
        if idx % cfg.TRAIN.PRINT == 0:
            print(f"step {idx} loss {loss.item():.4f} norm {float(grad_norm):.3f} scale {scaler.get_scale():.0f}")


if __name__ == "__main__":
    from pretrain_data import infinite_stream

    net = MaskedAE().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=cfg.TRAIN.BASE_LR, weight_decay=0.05, betas=(0.9, 0.999))
    sch = torch.optim.lr_scheduler.CosineAnnealingLR(opt, cfg.TRAIN.STEPS // cfg.TRAIN.ACCUMULATION_STEPS)
    train_steps(net, infinite_stream(), opt, sch, amp.GradScaler(enabled=cfg.AMP))
