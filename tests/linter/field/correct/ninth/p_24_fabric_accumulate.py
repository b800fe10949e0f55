# why correct: Fabric scales in fabric.backward, unscales in fabric.clip_gradients and steps through its scaler; clipping and stepping happen only at the end of a window
from dataclasses import dataclass

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Opts:
    accum: int = 4
    clip: float = 1.0
    lr: float = 3e-4
    epochs: int = 20
    devices: int = 2
    precision: str = "16-mixed"


class Captioner(nn.Module):
    def __init__(self, vocab=10000, dim=512):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 16, 16)
        self.emb = nn.Embedding(vocab, dim)
        self.tf = nn.Transformer(dim, 8, 4, 4, 2048, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, img, ids):
        src = self.patch(img).flatten(2).transpose(1, 2)
        causal = torch.triu(torch.ones(ids.size(1), ids.size(1), dtype=torch.bool, device=ids.device), 1)
        return self.out(self.tf(src, self.emb(ids), tgt_mask=causal))


@torch.no_grad()
def validate(fabric, model, loader):
    model.eval()
    total = torch.zeros(2, device=fabric.device)
    for img, ids in loader:
        logits = model(img, ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
        total += torch.stack([loss, torch.ones_like(loss)])
    total = fabric.all_reduce(total, reduce_op="sum")
    model.train()
    return (total[0] / total[1]).item()


def main(train_loader, val_loader, o=Opts()):
    fabric = L.Fabric(accelerator="cuda", devices=o.devices, strategy="ddp", precision=o.precision)
    fabric.launch()
    fabric.seed_everything(1)
    with fabric.init_module():
        model = Captioner()
    optimizer = torch.optim.AdamW(model.parameters(), lr=o.lr)
    model, optimizer = fabric.setup(model, optimizer)
    train_loader, val_loader = fabric.setup_dataloaders(train_loader, val_loader)
    n = len(train_loader) - len(train_loader) % o.accum
    model.train()
    for epoch in range(o.epochs):
        for i, (img, ids) in enumerate(train_loader):
            if i >= n:
                break
            waiting = (i + 1) % o.accum != 0
            with fabric.no_backward_sync(model, enabled=waiting):
                logits = model(img, ids[:, :-1])
                loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
                fabric.backward(loss / o.accum)
            if not waiting:
                fabric.clip_gradients(model, optimizer, max_norm=o.clip)
                optimizer.step()
                optimizer.zero_grad()
        fabric.print(epoch, loss.item(), validate(fabric, model, val_loader))
    fabric.save("captioner.ckpt", {"model": model, "optimizer": optimizer, "epochs": o.epochs})
