# why correct: gradients are unscaled (inside a helper) before their norm is clipped, and each autocast region ends before the optimizer steps
import torch
from torch import nn
from torch.distributions import Normal


def finish_gradients(scaler, optimizer, parameters, limit):
    scaler.unscale_(optimizer)
    return nn.utils.clip_grad_norm_(parameters, limit)


def apply_step(scaler, optimizer):
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() >= before


class RecurrentPolicy(nn.Module):
    def __init__(self, obs, act, hidden=256):
        super().__init__()
        self.gru = nn.GRU(obs, hidden, batch_first=True)
        self.mean = nn.Linear(hidden, act)
        self.log_std = nn.Parameter(torch.full((act,), -0.5))
        self.value = nn.Linear(hidden, 1)

    def forward(self, obs, h0):
        seq, _ = self.gru(obs, h0)
        dist = Normal(self.mean(seq).float(), self.log_std.exp())
        return dist, self.value(seq).squeeze(-1).float()


class PPO:
    def __init__(self, policy, lr=3e-4, clip=0.2, limit=0.5, dtype=torch.float16):
        self.policy, self.clip, self.limit, self.dtype = policy.cuda(), clip, limit, dtype
        self.opt = torch.optim.Adam(policy.parameters(), lr=lr, eps=1e-5)
        self.scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
        self.applied = 0

    @torch.no_grad()
    def evaluate(self, roll):
        with torch.autocast("cuda", dtype=self.dtype):
            dist, value = self.policy(roll["obs"], roll["h0"])
        return dist.log_prob(roll["act"]).sum(-1), value

    def objective(self, part):
        with torch.autocast("cuda", dtype=self.dtype):
            dist, value = self.policy(part["obs"], part["h0"])
        logp = dist.log_prob(part["act"]).sum(-1)
        ratio = torch.exp(logp - part["logp"])
        gain = torch.minimum(ratio * part["adv"], ratio.clamp(1 - self.clip, 1 + self.clip) * part["adv"])
        return -gain.mean() + 0.5 * (value - part["ret"]).square().mean() - 1e-3 * dist.entropy().sum(-1).mean()

    def fit(self, roll, passes=5, minibatch=64):
        roll["logp"], _ = self.evaluate(roll)
        n = roll["obs"].shape[0]
        for _ in range(passes):
            for rows in torch.randperm(n, device="cuda").split(minibatch):
                part = {k: v[:, rows] if k == "h0" else v[rows] for k, v in roll.items()}
                loss = self.objective(part)
                self.opt.zero_grad(set_to_none=True)
                self.scaler.scale(loss).backward()
                norm = finish_gradients(self.scaler, self.opt, self.policy.parameters(), self.limit)
                self.applied += apply_step(self.scaler, self.opt)
        return loss.item(), float(norm)
