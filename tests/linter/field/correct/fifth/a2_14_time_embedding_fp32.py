# why correct: the time step stays float32 through the sinusoid (autocast switched off there) and only the finished embedding is cast to the weights' dtype
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def fourier(t, dim, longest=10_000.0):
    with torch.autocast(device_type=t.device.type, enabled=False):
        t = t.to(torch.float32)
        freq = torch.exp(torch.arange(dim // 2, device=t.device, dtype=torch.float32) * (-math.log(longest) / (dim // 2)))
        phase = t[:, None] * freq[None, :]
        return torch.cat((phase.sin(), phase.cos()), dim=1)


class Rope2d(nn.Module):
    def __init__(self, head_dim, theta=100.0):
        super().__init__()
        self.n, self.theta = head_dim // 4, theta

    @torch.no_grad()
    def forward(self, h, w, device):
        inv = self.theta ** (-torch.arange(self.n, device=device, dtype=torch.float64) / self.n)
        y, x = torch.meshgrid(torch.arange(h, device=device), torch.arange(w, device=device), indexing="ij")
        ang = torch.cat([y.reshape(-1, 1) * inv, x.reshape(-1, 1) * inv], -1)
        return ang.cos().float(), ang.sin().float()


def rotate(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim))

    def forward(self, x, c, cos, sin):
        b, n, d = x.shape
        q, k, v = self.qkv(self.ln1(x) + c).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + self.o(a.transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.ln2(x))


class Denoiser(nn.Module):
    def __init__(self, cin=4, dim=512, depth=8, heads=8):
        super().__init__()
        self.inp, self.out = nn.Linear(cin, dim), nn.Linear(dim, cin)
        self.rope = Rope2d(dim // heads)
        self.time = nn.Sequential(nn.Linear(256, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(depth))

    def forward(self, z, t):
        b, c, h, w = z.shape
        cos, sin = self.rope(h, w, z.device)
        x = self.inp(z.flatten(2).transpose(1, 2))
        e = self.time(fourier(t, 256).to(self.time[0].weight.dtype))[:, None]
        for layer in self.layers:
            x = checkpoint(layer, x, e, cos, sin, use_reentrant=False)
        return self.out(x).transpose(1, 2).reshape(b, c, h, w)


def step(net, opt, z):
    t = torch.randint(0, 1000, (len(z),), device=z.device)
    abar = torch.cos((t.double() / 1000 + 0.008) / 1.008 * math.pi / 2).square().float().view(-1, 1, 1, 1)
    eps = torch.randn_like(z)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        pred = net(abar.sqrt() * z + (1 - abar).sqrt() * eps, t)
    loss = F.mse_loss(pred.float(), eps)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    return loss.detach()
