"""
# style of: NVIDIA/apex:apex/contrib/optimizers/distributed_fused_adam.py (clipping aware of the scale)
# correct: the gradients are still scaled when they are clipped, but the limit is multiplied by the same scale, so the effect is that of clipping true gradients; the scaler unscales in step().
# torch: 1.10+
"""
import logging

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

log = logging.getLogger("train")


class WaveModel(nn.Module):
    def __init__(self, channels=64, layers=8, classes=256):
        super().__init__()
        self.front = nn.Conv1d(1, channels, 1)
        self.layers = nn.ModuleList(
            nn.Conv1d(channels, channels, 3, dilation=2**i, padding=2**i) for i in range(layers)
        )
        self.out = nn.Conv1d(channels, classes, 1)

    def forward(self, x):
        h = self.front(x)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.out(h)


def clip_scaled(parameters, max_norm, scaler):
    """Clips gradients which still carry the loss scale; returns the norm they would have without it."""
    scale = scaler.get_scale()
    scaled_norm = clip_grad_norm_(parameters, max_norm * scale)
    return scaled_norm / scale


def train_epoch(model, loader, optimizer, scaler, max_norm):
    model.train()
    norms = []
    for wave, codes in loader:
        wave, codes = wave.cuda(), codes.cuda()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(wave), codes)
        scaler.scale(loss).backward()
        norms.append(clip_scaled(model.parameters(), max_norm, scaler).detach())
        scaler.step(optimizer)
        scaler.update()
    norms = torch.stack(norms)
    log.info("median gradient norm %.4f", norms[norms.isfinite()].median().item())
    return loss.item()


def main(make_loader, epochs=100, max_norm=1.0, path="wave.pt"):
    logging.basicConfig(level=logging.INFO)
    model = WaveModel().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.cuda.amp.GradScaler(init_scale=2.0**14)
    for epoch in range(epochs):
        loss = train_epoch(model, make_loader(), optimizer, scaler, max_norm)
        log.info("epoch %d loss %.4f", epoch, loss)
        torch.save([model.state_dict(), optimizer.state_dict(), scaler.state_dict()], path)
