# why correct: each optimizer has its own scaler and its scale/step/update run only in the iterations in which that loss was computed
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal


def mlp(i, o, w=1024):
    return nn.Sequential(nn.Linear(i, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, o))


class Slot:
    """An optimizer together with its scaler."""

    def __init__(self, params, lr):
        self.params = list(params)
        self.opt = torch.optim.Adam(self.params, lr=lr)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)

    def apply(self, loss, clip=None):
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward(inputs=self.params)
        if clip:
            self.scaler.unscale_(self.opt)
            nn.utils.clip_grad_norm_(self.params, clip)
        before = self.scaler.get_scale()
        self.scaler.step(self.opt)
        self.scaler.update()
        return self.scaler.get_scale() >= before


class SAC:
    def __init__(self, obs, act, gamma=0.99, tau=0.005, delay=2):
        self.act, self.gamma, self.tau, self.delay = act, gamma, tau, delay
        self.pi = mlp(obs, 2 * act).cuda()
        self.q = nn.ModuleList(mlp(obs + act, 1) for _ in range(2)).cuda()
        self.q_old = copy.deepcopy(self.q).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.zeros((), device="cuda"))
        self.critic, self.actor = Slot(self.q.parameters(), 3e-4), Slot(self.pi.parameters(), 3e-4)
        self.temp = torch.optim.Adam([self.log_alpha], lr=3e-4)
        self.n = self.skipped = 0

    def half(self):
        return torch.autocast("cuda", dtype=torch.float16)

    def policy(self, s):
        with self.half():
            out = self.pi(s)
        mu, log_std = out.float().chunk(2, -1)
        dist = Normal(mu, log_std.clamp(-5, 2).exp())
        raw = dist.rsample()
        logp = dist.log_prob(raw) - 2 * (0.6931472 - raw - F.softplus(-2 * raw))
        return raw.tanh(), logp.sum(-1, keepdim=True)

    def values(self, nets, s, a):
        with self.half():
            out = [net(torch.cat([s, a], -1)) for net in nets]
        return [o.float() for o in out]

    def update(self, s, a, r, s2, done):
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            a2, logp2 = self.policy(s2)
            goal = r + self.gamma * (1 - done) * (torch.min(*self.values(self.q_old, s2, a2)) - alpha * logp2)
        loss = sum(F.mse_loss(v, goal) for v in self.values(self.q, s, a))
        self.skipped += not self.critic.apply(loss, clip=40.0)
        self.n += 1

        if self.n % self.delay == 0:
            action, logp = self.policy(s)
            self.actor.apply((alpha * logp - torch.min(*self.values(self.q, s, action))).mean())
            self.temp.zero_grad(set_to_none=True)
            (-self.log_alpha.exp() * (logp.detach() - self.act).mean()).backward()
            self.temp.step()

        with torch.no_grad():
            for new, old in zip(self.q.parameters(), self.q_old.parameters()):
                old.lerp_(new, self.tau)
