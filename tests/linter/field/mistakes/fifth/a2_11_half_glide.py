# source: https://github.com/afiaka87/glide-finetune/issues/5
# mistake: float16 parameters are optimised by AdamW with its default eps=1e-8, which is zero in float16, so the first update divides by zero and the weights become NaN
# severity: error
import torch
import torch.nn.functional as F
from torch import nn


class ResUnit(nn.Module):
    def __init__(self, c, temb):
        super().__init__()
        self.a = nn.Sequential(nn.GroupNorm(8, c), nn.SiLU(), nn.Conv2d(c, c, 3, padding=1))
        self.t = nn.Linear(temb, c)
        self.b = nn.Sequential(nn.GroupNorm(8, c), nn.SiLU(), nn.Conv2d(c, c, 3, padding=1))

    def forward(self, x, e):
        h = self.a(x) + self.t(e)[:, :, None, None]
        return x + self.b(h)


class Denoiser(nn.Module):
    def __init__(self, c=128, n=6, temb=256, levels=1000):
        super().__init__()
        self.emb = nn.Embedding(levels, temb)
        self.inp = nn.Conv2d(3, c, 3, padding=1)
        self.units = nn.ModuleList(ResUnit(c, temb) for _ in range(n))
        self.out = nn.Conv2d(c, 3, 3, padding=1)

    def forward(self, x, t):
        e = self.emb(t)
        h = self.inp(x)
        for u in self.units:
            h = u(h, e)
        return self.out(h)


def alphas(n=1000):
    betas = torch.linspace(1e-4, 2e-2, n, dtype=torch.float64)
    return torch.cumprod(1 - betas, 0).float()


def load_model(weights, use_fp16):
    net = Denoiser()
    net.load_state_dict(torch.load(weights, map_location="cpu"))
    net = net.cuda()
    if use_fp16:
        net = net.half()  # <- here
    return net


def finetune(weights, loader, use_fp16=True, lr=1e-5, epochs=10):
    net = load_model(weights, use_fp16)
    dtype = torch.float16 if use_fp16 else torch.float32
    abar = alphas().cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.0)  # <- here
    for epoch in range(epochs):
        for img in loader:
            x0 = img.cuda()
            t = torch.randint(0, 1000, (len(x0),), device="cuda")
            eps = torch.randn_like(x0)
            a = abar[t].view(-1, 1, 1, 1)
            xt = a.sqrt() * x0 + (1 - a).sqrt() * eps
            pred = net(xt.to(dtype), t)
            loss = F.mse_loss(pred.float(), eps)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # <- here
        print(f"epoch {epoch} loss {loss.item():.4f}")
    torch.save(net.state_dict(), "glide_tuned.pt")
