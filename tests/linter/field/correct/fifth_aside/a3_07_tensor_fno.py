# why correct: the Fourier layers leave autocast and run in float32, while the pointwise convolutions stay in float16
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast


class FourierLayer1d(nn.Module):
    def __init__(self, width, modes):
        super().__init__()
        self.modes = modes
        self.kernel = nn.Parameter(torch.randn(width, width, modes, 2) / width)

    @autocast("cuda", enabled=False)
    def forward(self, x):
        x = x.float()
        spectrum = torch.fft.rfft(x)
        mixed = torch.einsum("bim,iom->bom", spectrum[..., : self.modes], torch.view_as_complex(self.kernel))
        padded = F.pad(mixed, (0, spectrum.shape[-1] - self.modes))
        return torch.fft.irfft(padded, n=x.shape[-1])


class FNO1d(nn.Module):
    def __init__(self, width=64, modes=24, depth=4):
        super().__init__()
        self.lift = nn.Conv1d(2, width, 1)
        self.fourier = nn.ModuleList(FourierLayer1d(width, modes) for _ in range(depth))
        self.local = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth))
        self.project = nn.Sequential(nn.Conv1d(width, 128, 1), nn.GELU(), nn.Conv1d(128, 1, 1))

    def forward(self, u):
        grid = torch.linspace(0, 1, u.shape[-1], device=u.device).expand(u.shape[0], 1, -1)
        h = self.lift(torch.cat([u, grid], dim=1))
        for fourier, local in zip(self.fourier, self.local):
            h = F.gelu(fourier(h) + local(h))
        return self.project(h)


def relative_l2(guess, truth):
    guess, truth = guess.float().flatten(1), truth.float().flatten(1)
    return ((guess - truth).norm(dim=1) / truth.norm(dim=1).clamp_min(1e-6)).mean()


def train(train_loader, test_loader, epochs=200):
    net = FNO1d().cuda()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    plan = torch.optim.lr_scheduler.StepLR(opt, 50, 0.5)
    scaler = GradScaler("cuda")
    for epoch in range(epochs):
        net.train()
        for u0, u1 in train_loader:
            u0, u1 = u0.cuda(), u1.cuda()
            opt.zero_grad(set_to_none=True)
            with autocast("cuda", dtype=torch.float16):
                guess = net(u0)
            loss = relative_l2(guess, u1)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        plan.step()

        net.eval()
        errors = []
        with torch.no_grad():
            for u0, u1 in test_loader:
                errors.append(relative_l2(net(u0.cuda()), u1.cuda()))
        print(epoch, torch.stack(errors).mean().item())
    return net
