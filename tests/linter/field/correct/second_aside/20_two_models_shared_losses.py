"""
# style of: https://docs.pytorch.org/docs/stable/notes/amp_examples.html (multiple models, losses and optimizers)
# correct: every loss is scaled on its own, only one optimizer is unscaled by hand for clipping, both step, and update() runs once at the end.
# torch: 2.3+
"""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Tower(nn.Module):
    def __init__(self, n_in, n_out, width=512):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(n_in, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()
        )
        self.head = nn.Linear(width, n_out)

    def forward(self, x):
        return self.head(self.layers(x))


class CoTraining:
    """Two views of the same items; each tower learns from the labels and from the other's opinion."""

    def __init__(self, dim_a, dim_b, classes, agree=0.3, device="cuda"):
        self.device = device
        self.agree = agree
        self.tower_a = Tower(dim_a, classes).to(device)
        self.tower_b = Tower(dim_b, classes).to(device)
        self.opt_a = torch.optim.AdamW(self.tower_a.parameters(), lr=1e-3)
        self.opt_b = torch.optim.SGD(self.tower_b.parameters(), lr=0.05, momentum=0.9)
        self.scaler = torch.amp.GradScaler(device)

    def losses(self, a, b, y):
        la, lb = self.tower_a(a), self.tower_b(b)
        sup = F.cross_entropy(la, y) + F.cross_entropy(lb, y)
        pa, pb = F.log_softmax(la.float(), -1), F.log_softmax(lb.float(), -1)
        con = F.kl_div(pa, pb, log_target=True, reduction="batchmean")
        con = con + F.kl_div(pb, pa, log_target=True, reduction="batchmean")
        return sup, self.agree * con

    def step(self, a, b, y):
        self.opt_a.zero_grad(set_to_none=True)
        self.opt_b.zero_grad(set_to_none=True)
        with torch.autocast(self.device, dtype=torch.float16):
            sup, con = self.losses(a, b, y)

        self.scaler.scale(sup).backward(retain_graph=True)
        self.scaler.scale(con).backward()

        # only the tower with plain SGD needs a limit
        self.scaler.unscale_(self.opt_b)
        nn.utils.clip_grad_norm_(self.tower_b.parameters(), 1.0)

        self.scaler.step(self.opt_a)
        self.scaler.step(self.opt_b)
        self.scaler.update()
        return sup.item(), con.item()

    def state_dict(self):
        parts = ("tower_a", "tower_b", "opt_a", "opt_b", "scaler")
        return {name: getattr(self, name).state_dict() for name in parts}

    def load_state_dict(self, state):
        for name, value in state.items():
            getattr(self, name).load_state_dict(value)


def main(loader, epochs=20, path="cotrain.pt"):
    learner = CoTraining(300, 128, 40)
    for epoch in range(epochs):
        for a, b, y in loader:
            sup, con = learner.step(a.cuda(), b.cuda(), y.cuda())
        print(f"{epoch}: supervised {sup:.3f} agreement {con:.4f}")
        torch.save(learner.state_dict(), path)
