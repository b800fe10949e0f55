# why correct: the bfloat16 phase needs no scaler, and the closure-based LBFGS phase runs in float32 without autocast or scaler, since it cannot be combined with one
import torch
import torch.nn as nn


class Field(nn.Module):
    def __init__(self, width=256, depth=5):
        super().__init__()
        sizes = [2] + [width] * depth
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes[:-1], sizes[1:]))
        self.out = nn.Linear(width, 1)

    def forward(self, xt):
        h = xt
        for layer in self.hidden:
            h = torch.tanh(layer(h))
        return self.out(h)


def data_loss(net, xt, u, low):
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=low):
        pred = net(xt)
    return (pred.float() - u).square().mean()


def residual(net, xt, nu):
    xt = xt.detach().requires_grad_(True)
    u = net(xt)
    g = torch.autograd.grad(u.sum(), xt, create_graph=True)[0]
    ux, ut = g[:, :1], g[:, 1:]
    uxx = torch.autograd.grad(ux.sum(), xt, create_graph=True)[0][:, :1]
    return (ut + u * ux - nu * uxx).square().mean()


def pretrain(net, sampler, steps, lr=1e-3):
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    for i in range(steps):
        xt, u = sampler()
        loss = data_loss(net, xt, u, low=True)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        sched.step()
        if i % 1000 == 0:
            print("pretrain", i, loss.item())


def refine(net, xt, u, points, nu, iterations):
    opt = torch.optim.LBFGS(net.parameters(), max_iter=20, history_size=50, line_search_fn="strong_wolfe")

    def closure():
        opt.zero_grad()
        loss = data_loss(net, xt, u, low=False) + residual(net, points, nu)
        loss.backward()
        return loss

    for i in range(iterations):
        loss = opt.step(closure)
        print("refine", i, float(loss))


def main(xt, u, nu=0.01 / torch.pi, steps=20_000, iterations=200):
    torch.backends.cuda.matmul.allow_tf32 = False
    net = Field().cuda()
    xt, u = xt.cuda(), u.cuda()

    def sampler(n=4096):
        idx = torch.randint(0, len(xt), (n,), device=xt.device)
        return xt[idx], u[idx]

    pretrain(net, sampler, steps)
    points = torch.rand(20_000, 2, device="cuda") * 2 - 1
    refine(net, xt, u, points, nu, iterations)
    torch.save(net.state_dict(), "burgers.pt")
