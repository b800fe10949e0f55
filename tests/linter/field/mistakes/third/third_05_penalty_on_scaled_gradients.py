import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


class Generator(nn.Module):
    def __init__(self, z_dim=128, ch=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.ConvTranspose2d(z_dim, ch * 8, 4, 1, 0, bias=False), nn.BatchNorm2d(ch * 8), nn.ReLU(True),
            nn.ConvTranspose2d(ch * 8, ch * 4, 4, 2, 1, bias=False), nn.BatchNorm2d(ch * 4), nn.ReLU(True),
            nn.ConvTranspose2d(ch * 4, ch * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ch * 2), nn.ReLU(True),
            nn.ConvTranspose2d(ch * 2, 3, 4, 2, 1), nn.Tanh(),
        )

    def forward(self, z):
        return self.net(z[:, :, None, None])


class Critic(nn.Module):
    def __init__(self, ch=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, ch, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(ch, ch * 2, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(ch * 2, ch * 4, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(ch * 4, 1, 4),
        )

    def forward(self, x):
        return self.net(x).flatten()


def gradient_penalty(critic, real, fake, scaler):
    alpha = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    with torch.autocast("cuda", dtype=torch.float16):
        score = critic(mixed).float().sum()
    grads, = torch.autograd.grad(scaler.scale(score), mixed, create_graph=True)
    norm = grads.flatten(1).norm(2, dim=1)  # <- here
    return ((norm - 1) ** 2).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--n_critic", type=int, default=5)
    parser.add_argument("--gp_weight", type=float, default=10.0)
    args = parser.parse_args()
    tf = transforms.Compose([transforms.Resize(32), transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)])
    loader = DataLoader(datasets.CIFAR10("data", transform=tf, download=True), 128, shuffle=True, drop_last=True)
    G, D = Generator().cuda(), Critic().cuda()
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-4, betas=(0.0, 0.9))
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-4, betas=(0.0, 0.9))
    scaler_g, scaler_d = torch.amp.GradScaler("cuda"), torch.amp.GradScaler("cuda")

    for epoch in range(args.epochs):
        for it, (real, _) in enumerate(loader):
            real = real.cuda()
            z = torch.randn(real.size(0), 128, device="cuda")
            with torch.autocast("cuda", dtype=torch.float16):
                with torch.no_grad():
                    fake = G(z)
                loss_d = D(fake).float().mean() - D(real).float().mean()
            loss_d = loss_d + args.gp_weight * gradient_penalty(D, real, fake.float(), scaler_d)
            opt_d.zero_grad(set_to_none=True)
            scaler_d.scale(loss_d).backward()
            scaler_d.step(opt_d)
            scaler_d.update()

            if it % args.n_critic == 0:
                D.requires_grad_(False)
                with torch.autocast("cuda", dtype=torch.float16):
                    loss_g = -D(G(z)).float().mean()
                opt_g.zero_grad(set_to_none=True)
                scaler_g.scale(loss_g).backward()
                scaler_g.step(opt_g)
                scaler_g.update()
                D.requires_grad_(True)
        print(f"epoch {epoch} loss_d {loss_d.item():.4f} loss_g {loss_g.item():.4f}")


if __name__ == "__main__":
    main()
