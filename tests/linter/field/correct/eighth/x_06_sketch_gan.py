# why correct: both optimizers are stepped through one scaler whose scale changes only once, at the end of the iteration
import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast
from torch.nn import functional as F
from torch.nn.utils import spectral_norm

from sketches.pairs import pair_loader


def down(i, o, norm=True):
    layers = [nn.Conv2d(i, o, 4, 2, 1, bias=not norm)]
    if norm:
        layers.append(nn.InstanceNorm2d(o, affine=True))
    return nn.Sequential(*layers, nn.LeakyReLU(0.2))


def up(i, o):
    return nn.Sequential(
        nn.Upsample(scale_factor=2), nn.Conv2d(i, o, 3, 1, 1, bias=False), nn.InstanceNorm2d(o, affine=True), nn.ReLU()
    )


class Painter(nn.Module):
    def __init__(self, w=64):
        super().__init__()
        self.d1, self.d2, self.d3 = down(1, w, False), down(w, 2 * w), down(2 * w, 4 * w)
        self.u3, self.u2, self.u1 = up(4 * w, 2 * w), up(4 * w, w), up(2 * w, w)
        self.out = nn.Conv2d(w, 3, 3, 1, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(a)
        h = self.u3(self.d3(b))
        h = self.u2(torch.cat([h, b], 1))
        h = self.u1(torch.cat([h, a], 1))
        return torch.tanh(self.out(h))


class Judge(nn.Sequential):
    def __init__(self, w=64):
        super().__init__(
            spectral_norm(nn.Conv2d(4, w, 4, 2, 1)), nn.LeakyReLU(0.2),
            spectral_norm(nn.Conv2d(w, 2 * w, 4, 2, 1)), nn.LeakyReLU(0.2),
            spectral_norm(nn.Conv2d(2 * w, 1, 4, 1, 1)),
        )


painter, judge = Painter().cuda(), Judge().cuda()
opt_p = torch.optim.Adam(painter.parameters(), 2e-4, betas=(0.5, 0.999))
opt_j = torch.optim.Adam(judge.parameters(), 2e-4, betas=(0.5, 0.999))
scaler = GradScaler()

for epoch in range(100):
    for sketch, photo in pair_loader("pairs", 16):
        sketch, photo = sketch.cuda(), photo.cuda()
        with autocast():
            fake = painter(sketch)

        judge.requires_grad_(True)
        with autocast():
            real_score = judge(torch.cat([sketch, photo], 1))
            fake_score = judge(torch.cat([sketch, fake.detach()], 1))
            loss_j = F.relu(1 - real_score).mean() + F.relu(1 + fake_score).mean()
        opt_j.zero_grad(set_to_none=True)
        scaler.scale(loss_j).backward()
        scaler.step(opt_j)

        judge.requires_grad_(False)
        with autocast():
            score = judge(torch.cat([sketch, fake], 1))
            loss_p = -score.mean() + 100 * F.l1_loss(fake, photo)
        opt_p.zero_grad(set_to_none=True)
        scaler.scale(loss_p).backward()
        scaler.unscale_(opt_p)
        nn.utils.clip_grad_norm_(painter.parameters(), 10.0)
        scaler.step(opt_p)

        scaler.update()
    print(epoch, loss_j.item(), loss_p.item())
    torch.save(painter.state_dict(), f"painter_{epoch:03d}.pth")
