# why correct: the custom Function carries custom_fwd/custom_bwd and forces float32, and torch's checkpoint restores autocast when it recomputes
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import custom_bwd, custom_fwd
from torch.utils.checkpoint import checkpoint


class SoftplusSquare(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x, beta):
        s = F.softplus(x, beta=beta)
        ctx.save_for_backward(x, s)
        ctx.beta = beta
        return s * s

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, g):
        x, s = ctx.saved_tensors
        return g * 2 * s * torch.sigmoid(ctx.beta * x), None


class EnergyBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.a = nn.Linear(dim, 2 * dim)
        self.b = nn.Linear(2 * dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        h = SoftplusSquare.apply(self.a(self.norm(x)), 2.0)
        return x + self.b(h)


class ForceField(nn.Module):
    def __init__(self, species=100, dim=256, depth=10):
        super().__init__()
        self.emb = nn.Embedding(species, dim)
        self.rbf = nn.Linear(64, dim)
        self.blocks = nn.ModuleList(EnergyBlock(dim) for _ in range(depth))
        self.out = nn.Linear(dim, 1)

    def forward(self, z, radial, mol, n_mol):
        h = self.emb(z) + self.rbf(radial)
        for b in self.blocks:
            h = checkpoint(b, h, use_reentrant=False) if self.training else b(h)
        atom = self.out(h).float().squeeze(-1)
        return torch.zeros(n_mol, device=z.device).index_add(0, mol, atom)


def train(loader, epochs=100):
    net = ForceField().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=5e-4)
    scaler = torch.amp.GradScaler("cuda")
    for e in range(epochs):
        net.train()
        err = 0.0
        for z, radial, mol, energy in loader:
            z, radial, mol, energy = z.cuda(), radial.cuda(), mol.cuda(), energy.cuda()
            opt.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                pred = net(z, radial, mol, energy.numel())
            loss = F.l1_loss(pred, energy)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            scaler.step(opt)
            scaler.update()
            err += loss.item()
        print(e, err / len(loader))
