# source: https://github.com/pfnet/pytorch-pfn-extras/issues/636
# mistake: a closure is passed to scaler.step() for LBFGS; GradScaler does not support closures and raises RuntimeError.
# severity: error
# torch: any
import torch
from torch import nn


class PINN(nn.Module):
    def __init__(self, width=64, depth=4):
        super().__init__()
        layers = [nn.Linear(2, width), nn.Tanh()]
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, x, t):
        return self.net(torch.cat([x, t], dim=1))


class Solver:
    def __init__(self, model, lr=1.0, amp=True):
        self.model = model.cuda()
        self.amp = amp
        self.optimizer = torch.optim.LBFGS(model.parameters(), lr=lr, max_iter=20, line_search_fn="strong_wolfe")
        self.scaler = torch.amp.GradScaler("cuda", enabled=amp)

    def loss(self, x, t, u):
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.amp):
            return nn.functional.mse_loss(self.model(x, t), u)

    def step(self, x, t, u):
        def closure():
            self.optimizer.zero_grad()
            value = self.scaler.scale(self.loss(x, t, u))
            value.backward()
            return value

        closure()
        self.scaler.step(self.optimizer, closure=closure)  # <- here
        self.scaler.update()
        with torch.no_grad():
            return self.loss(x, t, u).item()


def main():
    torch.manual_seed(0)
    x = torch.rand(4096, 1, device="cuda")
    t = torch.rand(4096, 1, device="cuda")
    u = torch.sin(3 * x) * torch.exp(-t)
    solver = Solver(PINN())
    for i in range(100):
        print(i, solver.step(x, t, u))


if __name__ == "__main__":
    main()
