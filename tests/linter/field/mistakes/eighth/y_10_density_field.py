# source: https://github.com/nerfstudio-project/nerfacc/issues/307
# mistake: the loss is scaled by the GradScaler but the optimizer is stepped directly, so it gets gradients 1024 times too large and no overflow check.
# severity: error
import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
import tqdm

from fields.rays import SceneRays
from fields.render import march


class DensityField(nn.Module):
    def __init__(self, bands=8, width=128):
        super().__init__()
        self.register_buffer("freq", 2.0 ** torch.arange(bands).float() * math.pi)
        dim = 3 + 3 * 2 * bands
        self.trunk = nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                                   nn.Linear(width, width), nn.ReLU())
        self.sigma = nn.Linear(width, 1)
        self.color = nn.Linear(width, 3)

    def encode(self, xyz):
        ang = xyz[..., None] * self.freq
        return torch.cat([xyz, ang.sin().flatten(-2), ang.cos().flatten(-2)], dim=-1)

    def forward(self, xyz):
        h = self.trunk(self.encode(xyz))
        return F.softplus(self.sigma(h)), torch.sigmoid(self.color(h))


def psnr(mse):
    return -10.0 * math.log10(max(mse, 1e-10))


def main(scene, steps, batch, device="cuda:0"):
    torch.manual_seed(42)
    train_rays = SceneRays(scene, "train", batch=batch, device=device)
    test_rays = SceneRays(scene, "test", batch=None, device=device)

    field = DensityField().to(device)
    optimizer = torch.optim.SGD(field.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-6)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(
        optimizer, milestones=[steps // 2, steps * 3 // 4, steps * 9 // 10], gamma=0.33)
    grad_scaler = torch.cuda.amp.GradScaler(2 ** 10)  # <- here

    bar = tqdm.trange(steps)
    for step in bar:
        field.train()
        origin, direction, rgb = train_rays.sample()
        with torch.cuda.amp.autocast():
            pred, opacity = march(field, origin, direction, near=2.0, far=6.0, samples=128)
        loss = F.smooth_l1_loss(pred.float(), rgb)
        optimizer.zero_grad()
        grad_scaler.scale(loss).backward()  # <- here
        optimizer.step()  # <- here
        scheduler.step()

        if step % 200 == 0:
            bar.set_description(f"loss {loss.item():.4f} psnr {psnr(F.mse_loss(pred.float(), rgb).item()):.2f}")

        if step and step % 5000 == 0:
            field.eval()
            scores = []
            with torch.no_grad():
                for origin, direction, rgb in test_rays:
                    pred, _ = march(field, origin, direction, near=2.0, far=6.0, samples=128)
                    scores.append(psnr(F.mse_loss(pred, rgb).item()))
            print(f"step {step}: test psnr {sum(scores) / len(scores):.2f}")
            torch.save(field.state_dict(), f"{scene}_{step}.pth")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--scene", default="lego")
    ap.add_argument("--steps", type=int, default=20000)
    ap.add_argument("--batch", type=int, default=4096)
    a = ap.parse_args()
    main(a.scene, a.steps, a.batch)
