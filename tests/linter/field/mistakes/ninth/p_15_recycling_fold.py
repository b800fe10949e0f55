# source: pytorch/pytorch#65766 (OpenFold recycling)
# mistake: a no_grad pass and a pass with gradients share one autocast region; the cast weights cached under no_grad are reused and the linear layers get no gradient
# severity: error
import torch
import torch.nn as nn
import torch.nn.functional as F


class PairBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.LayerNorm(c)
        self.left = nn.Linear(c, c)
        self.right = nn.Linear(c, c)
        self.gate = nn.Linear(c, c)
        self.out = nn.Linear(c, c)

    def forward(self, z):
        x = self.norm(z)
        mixed = torch.einsum("bikc,bjkc->bijc", self.left(x), self.right(x)) / x.size(2)
        return z + torch.sigmoid(self.gate(x)) * self.out(mixed)


class Folder(nn.Module):
    def __init__(self, c=64, depth=4, bins=64, max_cycles=3):
        super().__init__()
        self.inp = nn.Linear(42, c)
        self.recycle = nn.Linear(c, c)
        self.blocks = nn.ModuleList(PairBlock(c) for _ in range(depth))
        self.head = nn.Linear(c, bins)
        self.max_cycles = max_cycles

    def trunk(self, feats, prev):
        z = self.inp(feats) + self.recycle(prev)
        for b in self.blocks:
            z = b(z)
        return z

    def forward(self, feats, cycles):
        B, N = feats.shape[:2]
        prev = torch.zeros(B, N, N, self.recycle.in_features, device=feats.device)
        with torch.no_grad():  # <- here
            for _ in range(cycles - 1):
                prev = self.trunk(feats, prev)  # <- here
        z = self.trunk(feats, prev)  # <- here
        return self.head(z)


class Fitter:
    def __init__(self, model, lr=1e-3):
        self.model = model.cuda()
        self.opt = torch.optim.Adam(self.model.parameters(), lr=lr)

    def step(self, feats, bins):
        cycles = int(torch.randint(2, self.model.max_cycles + 1, ()))
        self.opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):  # <- here
            logits = self.model(feats, cycles)
            loss = F.cross_entropy(logits.flatten(0, 2), bins.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.opt.step()
        return loss.item()


def main(loader, epochs=3):
    fitter = Fitter(Folder())
    for e in range(epochs):
        for feats, bins in loader:
            value = fitter.step(feats.cuda(), bins.cuda())
        print("epoch", e, "loss", value)
