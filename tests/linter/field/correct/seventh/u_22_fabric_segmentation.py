# why correct: Fabric owns the 16-mixed scaler: fabric.backward scales, fabric.clip_gradients unscales, the wrapped optimizer steps through it
import argparse

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric


def dice(logits, target, eps=1.0):
    prob = logits.float().sigmoid().flatten(1)
    target = target.float().flatten(1)
    inter = (prob * target).sum(1)
    return (1 - (2 * inter + eps) / (prob.sum(1) + target.sum(1) + eps)).mean()


class Segmenter:
    def __init__(self, fabric, model, optimizer, accumulate):
        self.fabric = fabric
        self.model = model
        self.optimizer = optimizer
        self.accumulate = accumulate

    def objective(self, image, mask):
        logits = self.model(image)
        return F.binary_cross_entropy_with_logits(logits.float(), mask.float()) + dice(logits, mask)

    def micro(self, image, mask, divisor, closing):
        with self.fabric.no_backward_sync(self.model, enabled=not closing):
            loss = self.objective(image, mask)
            self.fabric.backward(loss / divisor)
        if closing:
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def epoch(self, loader):
        self.model.train()
        n = len(loader)
        total = torch.zeros((), device=self.fabric.device)
        for i, (image, mask) in enumerate(loader):
            start = i - i % self.accumulate
            divisor = min(self.accumulate, n - start)
            total += self.micro(image, mask, divisor, closing=i + 1 == start + divisor)
        return (total / n).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--devices", type=int, default=2)
    ap.add_argument("--epochs", type=int, default=60)
    args = ap.parse_args()
    fabric = Fabric(accelerator="cuda", devices=args.devices, strategy="ddp", precision="16-mixed")
    fabric.launch()
    fabric.seed_everything(7)

    from farm.data import field_loader
    from farm.unet import UNet

    model = UNet(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(field_loader())
    seg = Segmenter(fabric, model, optimizer, accumulate=4)
    for epoch in range(args.epochs):
        fabric.print(f"{epoch}: {seg.epoch(loader):.4f}")
    fabric.save("fields.ckpt", {"model": model})


if __name__ == "__main__":
    main()
