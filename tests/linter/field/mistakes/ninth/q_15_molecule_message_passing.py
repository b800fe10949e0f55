# source: https://github.com/NVIDIA/apex/issues/455
# mistake: a float32 buffer receives half messages through index_add_ inside autocast, which raises because both must have one dtype
# severity: error
import torch
import torch.nn as nn
import torch.nn.functional as F


class Interaction(nn.Module):
    def __init__(self, dim, radial):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * dim + radial, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.node = nn.Sequential(nn.Linear(2 * dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, h, src, dst, rbf):
        msg = self.edge(torch.cat([h[src], h[dst], rbf], dim=-1))
        inbox = torch.zeros(h.shape[0], msg.shape[-1], dtype=torch.float32, device=h.device)  # <- here
        inbox.index_add_(0, dst, msg)  # <- here
        return h + self.node(torch.cat([h, inbox], dim=-1))


class EnergyNet(nn.Module):
    def __init__(self, species=100, dim=128, radial=32, depth=4, cutoff=6.0):
        super().__init__()
        self.embed = nn.Embedding(species, dim)
        self.register_buffer("centers", torch.linspace(0, cutoff, radial))
        self.gamma = (radial / cutoff) ** 2
        self.blocks = nn.ModuleList(Interaction(dim, radial) for _ in range(depth))
        self.readout = nn.Sequential(nn.Linear(dim, dim // 2), nn.SiLU(), nn.Linear(dim // 2, 1))

    def forward(self, g):
        src, dst = g["edges"]
        dist = (g["pos"][src] - g["pos"][dst]).norm(dim=-1, keepdim=True)
        rbf = torch.exp(-self.gamma * (dist - self.centers) ** 2)
        h = self.embed(g["z"])
        for block in self.blocks:
            h = block(h, src, dst, rbf)
        atom = self.readout(h).float().squeeze(-1)
        energy = torch.zeros(g["n_graphs"], device=atom.device)
        return energy.index_add(0, g["graph_id"], atom)


def to_gpu(g):
    return {k: (v.cuda(non_blocking=True) if torch.is_tensor(v) else v) for k, v in g.items()}


def fit(train_loader, valid_loader, epochs=200, lr=5e-4):
    model = EnergyNet().cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=10, factor=0.8)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        model.train()
        for g in map(to_gpu, train_loader):
            opt.zero_grad(set_to_none=True)
            with torch.amp.autocast("cuda", dtype=torch.float16):
                loss = F.l1_loss(model(g), g["energy"])
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            scaler.step(opt)
            scaler.update()

        model.eval()
        err, n = 0.0, 0
        with torch.no_grad():
            for g in map(to_gpu, valid_loader):
                err += (model(g) - g["energy"]).abs().sum().item()
                n += g["n_graphs"]
        plateau.step(err / n)
        print(epoch, err / n)
    return model
