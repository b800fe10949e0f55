# source: https://github.com/IAHispano/Applio/pull/860
# mistake: after scaler.step(opt) the optimizer itself is stepped once more, so each update is applied twice and overflowed (inf/nan) gradients are applied instead of skipped
# severity: error
import torch
import torch.nn.functional as F
from torch import nn
from torch.cuda import amp


class RDB(nn.Module):
    def __init__(self, nf=64):
        super().__init__()
        self.c1 = nn.Conv2d(nf, nf, 3, 1, 1)
        self.c2 = nn.Conv2d(nf, nf, 3, 1, 1)

    def forward(self, x):
        return x + 0.2 * self.c2(F.leaky_relu(self.c1(x), 0.2))


class Up4(nn.Module):
    def __init__(self, nf=64, nb=16):
        super().__init__()
        self.head = nn.Conv2d(3, nf, 3, 1, 1)
        self.body = nn.Sequential(*[RDB(nf) for _ in range(nb)])
        self.tail = nn.Sequential(nn.Conv2d(nf, 48, 3, 1, 1), nn.PixelShuffle(4))

    def forward(self, lr):
        f = self.head(lr)
        return self.tail(f + self.body(f))


def patch_critic(nf=64):
    layers, c = [], 3
    for m in (1, 2, 4, 8):
        layers += [nn.Conv2d(c, nf * m, 4, 2, 1), nn.LeakyReLU(0.2)]
        c = nf * m
    return nn.Sequential(*layers, nn.Conv2d(c, 1, 3, 1, 1))


G, D = Up4().cuda(), patch_critic().cuda()
g_optim = torch.optim.AdamW(G.parameters(), lr=1e-4, betas=(0.9, 0.99))
d_optim = torch.optim.AdamW(D.parameters(), lr=1e-4, betas=(0.9, 0.99))
scaler = amp.GradScaler()
bce = nn.BCEWithLogitsLoss()


def train_batch(lr_img, hr_img):
    for p in D.parameters():
        p.requires_grad_(False)
    with amp.autocast():
        sr = G(lr_img)
        score = D(sr)
        g_loss = F.l1_loss(sr, hr_img) + 5e-3 * bce(score, torch.ones_like(score))
    g_optim.zero_grad(set_to_none=True)
    scaler.scale(g_loss).backward()
    scaler.step(g_optim)
    g_optim.step()  # <- here

    for p in D.parameters():
        p.requires_grad_(True)
    with amp.autocast():
        real, fake = D(hr_img), D(sr.detach())
        d_loss = 0.5 * (bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake)))
    d_optim.zero_grad(set_to_none=True)
    scaler.scale(d_loss).backward()
    scaler.step(d_optim)
    d_optim.step()  # <- here

    scaler.update()
    return g_loss.item(), d_loss.item()


def main(loader, n_epochs=200):
    for epoch in range(n_epochs):
        for i, (low, high) in enumerate(loader):
            g, d = train_batch(low.cuda(), high.cuda())
            if i % 100 == 0:
                print(f"e{epoch} i{i} G {g:.4f} D {d:.4f}")
        torch.save({"G": G.state_dict(), "D": D.state_dict(), "g": g_optim.state_dict(),
                    "d": d_optim.state_dict(), "amp": scaler.state_dict()}, f"esr_{epoch:03d}.pt")
