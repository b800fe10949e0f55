# source: https://github.com/huggingface/transformers/pull/9705
# mistake: with a DeepSpeed fp16 engine the loss is backpropagated with loss.backward() rather than engine.backward(loss), so it is never multiplied by the loss scale (nor divided by the accumulation steps) that engine.step() assumes
# severity: error
import argparse

import deepspeed
import torch
from torch import nn
from torch.utils.data import Dataset

DS = {
    "train_micro_batch_size_per_gpu": 64,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1.5e-4, "betas": [0.9, 0.95], "weight_decay": 0.05}},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
    "zero_optimization": {"stage": 1},
}


class Masker(nn.Module):
    def __init__(self, dim=1024, depth=24, heads=16, patch=16, size=224, keep=0.25):
        super().__init__()
        self.patch, self.keep = patch, keep
        self.n = (size // patch) ** 2
        self.embed = nn.Linear(3 * patch * patch, dim)
        self.pos = nn.Parameter(torch.randn(1, self.n, dim) * 0.02)
        mk = lambda d, h: nn.TransformerEncoderLayer(d, h, 4 * d, batch_first=True, norm_first=True, dropout=0.0)
        self.encoder = nn.ModuleList(mk(dim, heads) for _ in range(depth))
        self.mask = nn.Parameter(torch.zeros(1, 1, dim))
        self.decoder = nn.ModuleList(mk(dim, heads) for _ in range(2))
        self.out = nn.Linear(dim, 3 * patch * patch)

    def forward(self, img):
        b, p = img.shape[0], self.patch
        g = img.shape[-1] // p
        x = img.view(b, 3, g, p, g, p).permute(0, 2, 4, 1, 3, 5).reshape(b, g * g, -1)
        order = torch.rand(b, self.n, device=img.device).argsort(1)
        k = int(self.n * self.keep)
        h = self.embed(x) + self.pos
        vis = h.gather(1, order[:, :k, None].expand(-1, -1, h.shape[-1]))
        for blk in self.encoder:
            vis = blk(vis)
        full = torch.cat([vis, (self.mask + self.pos).expand(b, -1, -1).gather(
            1, order[:, k:, None].expand(-1, -1, h.shape[-1]))], 1)
        for blk in self.decoder:
            full = blk(full)
        pred = self.out(full[:, k:]).float()
        goal = x.gather(1, order[:, k:, None].expand(-1, -1, x.shape[-1])).float()
        goal = (goal - goal.mean(-1, keepdim=True)) / (goal.var(-1, keepdim=True) + 1e-6).sqrt()
        return (pred - goal).square().mean()


def main(data: Dataset):
    ap = argparse.ArgumentParser()
    ap.add_argument("--local_rank", type=int, default=-1)
    ap.add_argument("--epochs", type=int, default=400)
    args = ap.parse_args()
    net = Masker()
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=net.parameters(), training_data=data, config=DS)
    for epoch in range(args.epochs):
        for step, img in enumerate(loader):
            loss = engine(img.to(engine.device, dtype=torch.float16))
            loss.backward()  # <- here
            engine.step()  # <- here
            if step % 50 == 0 and engine.global_rank == 0:
                print(epoch, step, f"{loss.item():.4f}", engine.get_lr()[0])
        engine.save_checkpoint("mae_ckpt", tag=f"e{epoch}")
