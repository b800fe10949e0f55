# why correct: custom_fwd casts the inputs and turns autocast off inside the function, custom_bwd gives the backward pass the same state, so all saved tensors have one dtype
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd
from torch.nn import functional as F

from qec.syndromes import SyndromeStream


class CheckMix(torch.autograd.Function):
    """Messages along the edges of a parity-check matrix H: y = H (x W), x W is made again in the backward pass."""

    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float16)
    def forward(ctx, x, checks, weight):
        ctx.save_for_backward(x, checks, weight)
        return checks @ (x @ weight)

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        x, checks, weight = ctx.saved_tensors
        back = checks.t() @ grad
        grad_x = back @ weight.t()
        grad_w = x.flatten(0, 1).t() @ back.flatten(0, 1)
        return grad_x, None, grad_w


class MessageLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dim))
        self.reply = nn.Parameter(torch.empty(dim, dim))
        self.norm_c, self.norm_b = nn.LayerNorm(dim), nn.LayerNorm(dim)
        for w in (self.weight, self.reply):
            nn.init.orthogonal_(w)

    def forward(self, bits, checks):
        c = F.gelu(self.norm_c(CheckMix.apply(bits, checks, self.weight)))
        return bits + F.gelu(self.norm_b(CheckMix.apply(c, checks.t(), self.reply)))


class Decoder(nn.Module):
    def __init__(self, checks, dim=128, rounds=8):
        super().__init__()
        self.register_buffer("checks", checks.float())
        self.register_buffer("degree", checks.float().sum(0).clamp(min=1))
        self.inp = nn.Linear(2, dim)
        self.layers = nn.ModuleList(MessageLayer(dim) for _ in range(rounds))
        self.out = nn.Linear(dim, 1)

    def forward(self, syndrome, prior):
        lit = (syndrome @ self.checks) / self.degree
        h = self.inp(torch.stack([lit.float(), prior.float()], -1))
        for layer in self.layers:
            h = layer(h, self.checks)
        return self.out(h).squeeze(-1)


def train(steps=200_000, batch=512, rate=0.03):
    stream = SyndromeStream("toric_8", rate)
    net = Decoder(stream.checks).cuda()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-4)
    scaler = torch.amp.GradScaler("cuda", growth_interval=1000)
    for step in range(steps):
        syndrome, prior, error = (t.cuda() for t in stream.draw(batch))
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            logits = net(syndrome.float(), prior)
            loss = F.binary_cross_entropy_with_logits(logits, error.float())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 500 == 0:
            print(step, loss.item())
    torch.save(net.state_dict(), "decoder.pt")


if __name__ == "__main__":
    train()
