# why correct: the live model is cast to bfloat16 only for inference copies; the averaged weights live in float32 and are updated from float32 parameters
import copy

import torch
from torch import nn
from torch.nn import functional as F


class Average:
    def __init__(self, net, decay=0.9999):
        self.decay = decay
        self.n = 0
        self.bank = {k: v.detach().clone().float() for k, v in net.state_dict().items() if v.is_floating_point()}

    @torch.no_grad()
    def update(self, net):
        self.n += 1
        d = min(self.decay, (1 + self.n) / (10 + self.n))
        for k, v in net.state_dict().items():
            if k in self.bank:
                self.bank[k].lerp_(v.detach().float(), 1 - d)

    def export(self, net, dtype=torch.bfloat16):
        out = copy.deepcopy(net)
        out.load_state_dict(self.bank, strict=False)
        return out.to(dtype).eval()


class Mixer(nn.Module):
    def __init__(self, c=192, n=64, depth=6):
        super().__init__()
        self.inp = nn.Linear(48, c)
        self.tok = nn.ModuleList(nn.Linear(n, n) for _ in range(depth))
        self.ch = nn.ModuleList(nn.Sequential(nn.Linear(c, 4 * c), nn.GELU(), nn.Linear(4 * c, c)) for _ in range(depth))
        self.n1 = nn.ModuleList(nn.LayerNorm(c) for _ in range(depth))
        self.n2 = nn.ModuleList(nn.LayerNorm(c) for _ in range(depth))
        self.out = nn.Linear(c, 48)

    def forward(self, x):
        x = self.inp(x)
        for t, c, a, b in zip(self.tok, self.ch, self.n1, self.n2):
            x = x + t(a(x).transpose(1, 2)).transpose(1, 2)
            x = x + c(b(x))
        return self.out(x)


@torch.inference_mode()
def preview(avg, net, val):
    small = avg.export(net)
    total, n = 0.0, 0
    for x, y in val:
        pred = small(x.cuda().bfloat16()).float()
        total += F.mse_loss(pred, y.cuda(), reduction="sum").item()
        n += y.numel()
    return total / n


def main(train, val, epochs=20):
    net = Mixer().cuda()
    avg = Average(net)
    opt = torch.optim.AdamW(net.parameters(), 3e-4)
    for e in range(epochs):
        for x, y in train:
            opt.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                pred = net(x.cuda())
            loss = F.mse_loss(pred.float(), y.cuda())
            loss.backward()
            opt.step()
            avg.update(net)
        print(e, preview(avg, net, val))
    torch.save({"net": net.state_dict(), "avg": avg.bank}, "mixer.pt")


if __name__ == "__main__":
    from weather import grids

    main(*grids())
