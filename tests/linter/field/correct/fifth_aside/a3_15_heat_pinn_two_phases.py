# why correct: the Adam phase runs under float16 with a scaler; the L-BFGS phase calls its closure in plain float32 without autocast and without the scaler
import torch
from torch import nn


class Field(nn.Module):
    def __init__(self, width=128, depth=5):
        super().__init__()
        rows, last = [], 2
        for _ in range(depth):
            rows += [nn.Linear(last, width), nn.Tanh()]
            last = width
        rows.append(nn.Linear(last, 1))
        self.net = nn.Sequential(*rows)

    def forward(self, x, t):
        return self.net(torch.stack([x, t], -1)).squeeze(-1)


def data_loss(field, samples):
    x, t, u = samples
    return nn.functional.mse_loss(field(x, t).float(), u)


def residual_loss(field, n, diffusivity=0.05):
    x = torch.rand(n, device="cuda", requires_grad=True)
    t = torch.rand(n, device="cuda", requires_grad=True)
    u = field(x, t)
    u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    u_xx, = torch.autograd.grad(u_x.sum(), x, create_graph=True)
    return (u_t - diffusivity * u_xx).square().mean()


def pretrain(field, samples, steps, batch=65536):
    opt = torch.optim.Adam(field.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(steps):
        rows = torch.randint(0, samples[0].shape[0], (batch,), device="cuda")
        part = [s[rows] for s in samples]
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = data_loss(field, part)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 1000 == 0:
            print("fit", step, loss.item())


def refine(field, samples, rounds, points=20000, weight=1e-2):
    opt = torch.optim.LBFGS(field.parameters(), lr=1.0, max_iter=20, history_size=50, line_search_fn="strong_wolfe")
    for r in range(rounds):
        seed = torch.randint(0, 2 ** 31, ()).item()

        def closure():
            opt.zero_grad()
            torch.manual_seed(seed)
            loss = data_loss(field, samples) + weight * residual_loss(field, points)
            loss.backward()
            return loss

        value = opt.step(closure)
        print("physics", r, float(value))
        torch.manual_seed(r)


def main(path):
    samples = [s.cuda().float() for s in torch.load(path)]
    field = Field().cuda()
    pretrain(field, samples, steps=10_000)
    refine(field, samples, rounds=200)
    torch.save(field.state_dict(), "heat.pt")


if __name__ == "__main__":
    import sys

    main(sys.argv[1])
