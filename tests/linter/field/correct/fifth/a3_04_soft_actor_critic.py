# why correct: three optimizers share one scaler, every loss is scaled with the same scale, and update() comes once after all steps
import copy

import torch
import torch.nn.functional as F
from torch import nn


def net(n_in, n_out, width=512):
    return nn.Sequential(nn.Linear(n_in, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, n_out))


class Actor(nn.Module):
    def __init__(self, obs, act):
        super().__init__()
        self.body = net(obs, 2 * act)

    def forward(self, obs):
        mean, log_std = self.body(obs).float().chunk(2, -1)
        dist = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = dist.rsample()
        logp = dist.log_prob(raw) - 2 * (0.6931472 - raw - F.softplus(-2 * raw))
        return raw.tanh(), logp.sum(-1)


class Twin(nn.Module):
    def __init__(self, obs, act):
        super().__init__()
        self.a, self.b = net(obs + act, 1), net(obs + act, 1)

    def forward(self, obs, act):
        x = torch.cat([obs, act], -1)
        return self.a(x).squeeze(-1).float(), self.b(x).squeeze(-1).float()


class SAC:
    def __init__(self, obs, act, lr=3e-4, gamma=0.99, tau=0.005):
        self.actor, self.critic = Actor(obs, act).cuda(), Twin(obs, act).cuda()
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = torch.zeros((), device="cuda", requires_grad=True)
        self.goal = -float(act)
        self.gamma, self.tau = gamma, tau
        self.opt_actor = torch.optim.Adam(self.actor.parameters(), lr)
        self.opt_critic = torch.optim.Adam(self.critic.parameters(), lr)
        self.opt_alpha = torch.optim.Adam([self.log_alpha], lr)
        self.optimizers = (self.opt_critic, self.opt_actor, self.opt_alpha)
        self.scaler = torch.amp.GradScaler("cuda")

    def learn(self, obs, act, rew, nxt, done):
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            next_act, next_logp = self.actor(nxt)
            target_q = torch.min(*self.target(nxt, next_act)) - alpha * next_logp
            goal = rew + self.gamma * (1 - done) * target_q

        with torch.autocast("cuda", dtype=torch.float16):
            q1, q2 = self.critic(obs, act)
            critic_loss = F.mse_loss(q1, goal) + F.mse_loss(q2, goal)
            new_act, logp = self.actor(obs)
            self.critic.requires_grad_(False)
            actor_loss = (alpha * logp - torch.min(*self.critic(obs, new_act))).mean()
            self.critic.requires_grad_(True)
            alpha_loss = -(self.log_alpha * (logp.detach() + self.goal)).mean()

        for opt in self.optimizers:
            opt.zero_grad(set_to_none=True)
        for loss in (critic_loss, actor_loss, alpha_loss):
            self.scaler.scale(loss).backward()
        for opt in self.optimizers:
            self.scaler.step(opt)
        self.scaler.update()

        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.critic.parameters()):
                slow.lerp_(fast, self.tau)
        return critic_loss.item(), actor_loss.item()
