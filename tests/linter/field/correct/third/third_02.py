import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

cfg = {"z_dim": 128, "epochs": 100, "batch_size": 128, "lr": 2e-4, "gp_every": 16, "gp_weight": 5.0}


class Generator(nn.Module):
    def __init__(self, z_dim, ch=64):
        super().__init__()
        self.fc = nn.Linear(z_dim, ch * 4 * 16)
        self.net = nn.Sequential(
            nn.ConvTranspose2d(ch * 4, ch * 2, 4, 2, 1), nn.BatchNorm2d(ch * 2), nn.ReLU(),
            nn.ConvTranspose2d(ch * 2, ch, 4, 2, 1), nn.BatchNorm2d(ch), nn.ReLU(),
            nn.ConvTranspose2d(ch, 3, 4, 2, 1), nn.Tanh(),
        )

    def forward(self, z):
        return self.net(self.fc(z).view(z.size(0), -1, 4, 4))


class Discriminator(nn.Module):
    def __init__(self, ch=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, ch, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(ch, ch * 2, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(ch * 2, ch * 4, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(ch * 4, 1, 4),
        )

    def forward(self, x):
        return self.net(x).flatten()


def r1_penalty(disc, real, scaler):
    real = real.detach().requires_grad_(True)
    with torch.autocast("cuda", dtype=torch.float16):
        score = disc(real).float().sum()
    scaled, = torch.autograd.grad(scaler.scale(score), real, create_graph=True)
    grads = scaled.float() * (1.0 / scaler.get_scale())
    return grads.pow(2).flatten(1).sum(1).mean()


def main():
    tf = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)])
    loader = DataLoader(datasets.CIFAR10("data", transform=tf, download=True), cfg["batch_size"], shuffle=True,
                        num_workers=4, drop_last=True)
    gen, disc = Generator(cfg["z_dim"]).cuda(), Discriminator().cuda()
    g_opt = torch.optim.Adam(gen.parameters(), lr=cfg["lr"], betas=(0.0, 0.99))
    d_opt = torch.optim.Adam(disc.parameters(), lr=cfg["lr"], betas=(0.0, 0.99))
    scaler = torch.amp.GradScaler("cuda")
    it = 0
    for epoch in range(cfg["epochs"]):
        for real, _ in loader:
            real = real.cuda(non_blocking=True)
            z = torch.randn(real.size(0), cfg["z_dim"], device="cuda")
            with torch.autocast("cuda", dtype=torch.float16):
                fake = gen(z)
                d_loss = F.softplus(disc(fake.detach())).mean() + F.softplus(-disc(real)).mean()
            if it % cfg["gp_every"] == 0:
                d_loss = d_loss + cfg["gp_weight"] * cfg["gp_every"] * r1_penalty(disc, real, scaler)
            d_opt.zero_grad(set_to_none=True)
            scaler.scale(d_loss).backward()

            disc.requires_grad_(False)
            with torch.autocast("cuda", dtype=torch.float16):
                g_loss = F.softplus(-disc(fake)).mean()
            g_opt.zero_grad(set_to_none=True)
            scaler.scale(g_loss).backward()
            disc.requires_grad_(True)

            scaler.step(d_opt)
            scaler.step(g_opt)
            scaler.update()
            it += 1
        print(f"epoch {epoch} d {d_loss.item():.4f} g {g_loss.item():.4f} scale {scaler.get_scale():.0f}")


if __name__ == "__main__":
    main()
