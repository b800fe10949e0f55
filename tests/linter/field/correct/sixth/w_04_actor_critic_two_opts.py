# why correct: one scaler serves two optimizers and a third (temperature) that is in plain float32; each scaled optimizer is stepped once and update() comes once, after both
import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal


def mlp(i, o, h=512):
    return nn.Sequential(nn.Linear(i, h), nn.LayerNorm(h), nn.ELU(), nn.Linear(h, h), nn.ELU(), nn.Linear(h, o))


class Policy(nn.Module):
    def __init__(self, obs, act):
        super().__init__()
        self.net = mlp(obs, 2 * act)

    def forward(self, o):
        mu, log_std = self.net(o).float().chunk(2, -1)
        with torch.autocast("cuda", enabled=False):
            dist = Normal(mu, log_std.clamp(-5, 2).exp())
            u = dist.rsample()
            a = torch.tanh(u)
            logp = dist.log_prob(u) - torch.log1p(-a.square() + 1e-6)
        return a, logp.sum(-1)


class Twin(nn.Module):
    def __init__(self, obs, act):
        super().__init__()
        self.a, self.b = mlp(obs + act, 1), mlp(obs + act, 1)

    def forward(self, o, u):
        z = torch.cat([o, u], -1)
        return self.a(z).squeeze(-1).float(), self.b(z).squeeze(-1).float()


class SAC:
    def __init__(self, obs, act, lr=3e-4, gamma=0.99, tau=0.005, dtype=torch.float16):
        self.pi = Policy(obs, act).cuda()
        self.q = Twin(obs, act).cuda()
        self.q_slow = copy.deepcopy(self.q).requires_grad_(False)
        self.log_alpha = torch.zeros((), device="cuda", requires_grad=True)
        self.opt_pi = torch.optim.Adam(self.pi.parameters(), lr)
        self.opt_q = torch.optim.Adam(self.q.parameters(), lr)
        self.opt_alpha = torch.optim.Adam([self.log_alpha], lr)
        self.scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
        self.target_entropy = -float(act)
        self.gamma, self.tau, self.dtype = gamma, tau, dtype

    def cast(self):
        return torch.autocast("cuda", dtype=self.dtype)

    def update(self, o, u, r, o2, done):
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad(), self.cast():
            u2, lp2 = self.pi(o2)
            nxt = torch.min(*self.q_slow(o2, u2)) - alpha * lp2
            goal = r + self.gamma * (1 - done) * nxt

        with self.cast():
            q1, q2 = self.q(o, u)
        q_loss = F.mse_loss(q1, goal) + F.mse_loss(q2, goal)
        self.opt_q.zero_grad(set_to_none=True)
        self.scaler.scale(q_loss).backward()
        self.scaler.step(self.opt_q)

        self.q.requires_grad_(False)
        with self.cast():
            act, logp = self.pi(o)
            value = torch.min(*self.q(o, act))
        pi_loss = (alpha * logp - value).mean()
        self.opt_pi.zero_grad(set_to_none=True)
        self.scaler.scale(pi_loss).backward()
        self.scaler.unscale_(self.opt_pi)
        nn.utils.clip_grad_norm_(self.pi.parameters(), 10.0)
        self.scaler.step(self.opt_pi)
        self.q.requires_grad_(True)
        self.scaler.update()

        a_loss = -(self.log_alpha.exp() * (logp.detach() + self.target_entropy)).mean()
        self.opt_alpha.zero_grad(set_to_none=True)
        a_loss.backward()
        self.opt_alpha.step()

        with torch.no_grad():
            for slow, fast in zip(self.q_slow.parameters(), self.q.parameters()):
                slow.lerp_(fast, self.tau)
        return q_loss.item(), pi_loss.item()
