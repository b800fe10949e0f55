# why correct: the network that runs is bfloat16, but AdamW updates float32 master parameters and the average is taken in float32 over the masters
from typing import Dict, List

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MasterWeights:
    def __init__(self, net: nn.Module):
        self.pairs: Dict[str, tuple] = {}
        for name, p in net.named_parameters():
            self.pairs[name] = (p, p.detach().clone().float().requires_grad_())
        net.to(torch.bfloat16)

    def parameters(self) -> List[Tensor]:
        return [m for _, m in self.pairs.values()]

    @torch.no_grad()
    def pull_grads(self):
        for low, master in self.pairs.values():
            if low.grad is not None:
                g = low.grad.float()
                master.grad = g if master.grad is None else master.grad.add_(g)
                low.grad = None

    @torch.no_grad()
    def push_values(self):
        for low, master in self.pairs.values():
            low.copy_(master)

    def state_dict(self):
        return {n: m.detach() for n, (_, m) in self.pairs.items()}


class Average:
    def __init__(self, source: MasterWeights, beta: float):
        self.beta = beta
        self.values = {n: m.detach().clone() for n, (_, m) in source.pairs.items()}

    @torch.no_grad()
    def update(self, source: MasterWeights):
        for n, (_, m) in source.pairs.items():
            self.values[n].lerp_(m, 1 - self.beta)


def micro_step(net, latents, text, n_micro):
    sigma = torch.rand(len(latents), device=latents.device)
    noise = torch.randn_like(latents)
    s = sigma.view(-1, 1, 1, 1)
    noisy = (1 - s) * latents + s * noise
    pred = net(noisy.bfloat16(), sigma, text.bfloat16())
    loss = F.mse_loss(pred.float(), noise - latents)
    (loss / n_micro).backward()
    return loss.item()


def train(net, loader, steps, n_micro=4, lr=1e-4, beta=0.9999):
    net.cuda().train()
    master = MasterWeights(net)
    average = Average(master, beta)
    opt = torch.optim.AdamW(master.parameters(), lr=lr, weight_decay=0.01)
    it = iter(loader)
    for step in range(steps):
        losses = []
        for _ in range(n_micro):
            try:
                latents, text = next(it)
            except StopIteration:
                it = iter(loader)
                latents, text = next(it)
            losses.append(micro_step(net, latents.cuda().float(), text.cuda(), n_micro))
            master.pull_grads()
        nn.utils.clip_grad_norm_(master.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        master.push_values()
        average.update(master)
        if step % 500 == 0:
            print(step, sum(losses) / len(losses))
            torch.save({"master": master.state_dict(), "ema": average.values, "opt": opt.state_dict(), "step": step},
                       "state.pt")
