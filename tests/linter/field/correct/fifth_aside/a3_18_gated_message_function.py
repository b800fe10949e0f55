# why correct: the custom Function is decorated with custom_fwd/custom_bwd, so its backward runs under the same autocast state as its forward
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd


class GatedMessage(torch.autograd.Function):
    """m = (h W) * sigmoid(g); recomputes the product in backward to save memory."""

    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(ctx, h, w, gate):
        ctx.save_for_backward(h, w, gate)
        return torch.mm(h, w) * torch.sigmoid(gate)

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        h, w, gate = ctx.saved_tensors
        s = torch.sigmoid(gate)
        inner = grad * s
        grad_h = torch.mm(inner, w.t()).to(h.dtype)
        grad_w = torch.mm(h.t(), inner).to(w.dtype)
        grad_gate = (grad * torch.mm(h, w) * s * (1 - s)).to(gate.dtype)
        return grad_h, grad_w, grad_gate


class MoleculeNet(nn.Module):
    def __init__(self, dim=192, rounds=5):
        super().__init__()
        self.atom = nn.Embedding(120, dim)
        self.bond = nn.Embedding(24, dim)
        self.w = nn.ParameterList(nn.Parameter(torch.randn(dim, dim) / dim ** 0.5) for _ in range(rounds))
        self.norm = nn.ModuleList(nn.LayerNorm(dim) for _ in range(rounds))
        self.readout = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 1))

    def forward(self, z, bond, src, dst, owner, n_graphs):
        h, gate = self.atom(z), self.bond(bond)
        for w, norm in zip(self.w, self.norm):
            message = GatedMessage.apply(norm(h)[src], w, gate).float()
            h = h + torch.zeros_like(h).index_add(0, dst, message)
        total = h.new_zeros(n_graphs, h.shape[1]).index_add(0, owner, h)
        return self.readout(total).squeeze(-1)


def fit(loader, epochs=100, lr=4e-4):
    net = MoleculeNet().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=lr)
    plan = torch.optim.lr_scheduler.ExponentialLR(opt, 0.97)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for z, bond, src, dst, owner, y in loader:
            z, bond, src, dst, owner, y = (t.cuda() for t in (z, bond, src, dst, owner, y))
            opt.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                guess = net(z, bond, src, dst, owner, y.shape[0])
                loss = nn.functional.l1_loss(guess, y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        plan.step()
        print(epoch, loss.item(), plan.get_last_lr()[0])
    return net
