import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import custom_bwd, custom_fwd
from torch.utils.data import DataLoader
from torchvision import models

from pairs import CaptionPairs

NEG = -1e9


class MaskedInfoNCE(torch.autograd.Function):
    """Row-wise -log softmax of the diagonal; ``drop`` marks false negatives. Computed in float32 throughout."""

    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, sim, drop):
        sim = sim.masked_fill(drop, NEG)
        z = torch.exp(sim - sim.amax(dim=1, keepdim=True))
        prob = z / (z.sum(dim=1, keepdim=True) + 1e-12)
        ctx.save_for_backward(prob)
        return -torch.log(prob.diagonal() + 1e-12).mean()

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        (prob,) = ctx.saved_tensors
        out = prob.clone()
        out.diagonal().sub_(1.0)
        return out * (grad / prob.size(0)), None


class TextTower(nn.Module):
    def __init__(self, vocab=32_000, dim=512, depth=6, heads=8, ctx=77):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim, padding_idx=0)
        self.pos = nn.Parameter(torch.randn(ctx, dim) * 0.01)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, 0.0, "gelu", batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.out = nn.Linear(dim, 512, bias=False)

    def forward(self, ids):
        pad = ids == 0
        h = self.enc(self.tok(ids) + self.pos[: ids.size(1)], src_key_padding_mask=pad)
        keep = (~pad).unsqueeze(-1)
        return self.out((h * keep).sum(1) / keep.sum(1))


class DualEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = models.resnet50(weights="DEFAULT")
        self.image.fc = nn.Linear(2048, 512, bias=False)
        self.text = TextTower()
        self.log_temp = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images, ids):
        a = F.normalize(self.image(images), dim=-1)
        b = F.normalize(self.text(ids), dim=-1)
        return a @ b.t() * self.log_temp.exp().clamp(max=100.0)


def train(epochs=30, batch=512, device="cuda"):
    torch.manual_seed(0)
    model = DualEncoder().to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.2, betas=(0.9, 0.98), eps=1e-6)
    loader = DataLoader(CaptionPairs("cc3m"), batch, shuffle=True, num_workers=16, pin_memory=True, drop_last=True)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 5e-4, total_steps=epochs * len(loader))
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for it, (images, ids, group) in enumerate(loader):
            images, ids, group = images.to(device), ids.to(device), group.to(device)
            same = group[:, None] == group[None]
            drop = same & ~torch.eye(len(group), dtype=torch.bool, device=device)
            with torch.autocast("cuda", dtype=torch.float16):
                sim = model(images, ids)
                loss = 0.5 * (MaskedInfoNCE.apply(sim, drop) + MaskedInfoNCE.apply(sim.t(), drop.t()))
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = scaler.get_scale()
            scaler.step(opt)
            scaler.update()
            if scaler.get_scale() >= before:
                sched.step()
            if it % 100 == 0:
                print(f"{epoch}:{it} loss {loss.item():.3f} norm {norm.item():.2f} t {model.log_temp.exp().item():.1f}")
        torch.save(model.state_dict(), f"dual_{epoch:02d}.pt")


if __name__ == "__main__":
    train()
