import argparse
import copy

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal


def mlp(sizes):
    layers = []
    for a, b in zip(sizes[:-2], sizes[1:-1]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


class Actor(nn.Module):
    def __init__(self, obs_dim, act_dim):
        super().__init__()
        self.net = mlp([obs_dim, 256, 256, 2 * act_dim])

    def forward(self, obs):
        mu, log_std = self.net(obs).float().chunk(2, -1)
        dist = Normal(mu, log_std.clamp(-5, 2).exp())
        u = dist.rsample()
        logp = dist.log_prob(u) - 2 * (np.log(2) - u - F.softplus(-2 * u))
        return torch.tanh(u), logp.sum(-1, keepdim=True)


class Replay:
    def __init__(self, obs_dim, act_dim, size):
        self.bufs = [torch.zeros(size, d) for d in (obs_dim, act_dim, 1, obs_dim, 1)]
        self.size, self.ptr, self.full = size, 0, False

    def add(self, *items):
        for buf, item in zip(self.bufs, items):
            buf[self.ptr] = torch.as_tensor(item, dtype=torch.float32)
        self.ptr = (self.ptr + 1) % self.size
        self.full |= self.ptr == 0

    def sample(self, n):
        idx = torch.randint(0, self.size if self.full else self.ptr, (n,))
        return [b[idx].cuda() for b in self.bufs]


def main(args):
    env = gym.make(args.env)
    o_dim, a_dim = env.observation_space.shape[0], env.action_space.shape[0]
    actor = Actor(o_dim, a_dim).cuda()
    critics = nn.ModuleList(mlp([o_dim + a_dim, 256, 256, 1]) for _ in range(2)).cuda()
    targets = copy.deepcopy(critics).requires_grad_(False)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=3e-4)
    critic_opt = torch.optim.Adam(critics.parameters(), lr=3e-4)
    actor_scaler = torch.amp.GradScaler("cuda")
    critic_scaler = torch.amp.GradScaler("cuda")
    replay = Replay(o_dim, a_dim, 1_000_000)
    obs, _ = env.reset(seed=args.seed)
    for t in range(args.steps):
        with torch.no_grad():
            act = actor(torch.as_tensor(obs, dtype=torch.float32, device="cuda")[None])[0][0].cpu().numpy()
        nxt, rew, term, trunc, _ = env.step(act)
        replay.add(obs, act, [rew], nxt, [float(term)])
        obs = env.reset()[0] if term or trunc else nxt
        if t < args.warmup:
            continue
        s, a, r, s2, d = replay.sample(args.batch_size)
        with torch.autocast("cuda", dtype=torch.float16):
            with torch.no_grad():
                a2, logp2 = actor(s2)
                q2 = torch.min(*[q(torch.cat([s2, a2], -1)).float() for q in targets])
                y = r + args.gamma * (1 - d) * (q2 - args.alpha * logp2)
            critic_loss = sum(F.mse_loss(q(torch.cat([s, a], -1)).float(), y) for q in critics)
        critic_opt.zero_grad(set_to_none=True)
        critic_scaler.scale(critic_loss).backward()
        critic_scaler.step(critic_opt)
        critic_scaler.update()

        critics.requires_grad_(False)
        with torch.autocast("cuda", dtype=torch.float16):
            pi, logp = actor(s)
            q = torch.min(*[q(torch.cat([s, pi], -1)).float() for q in critics])
            actor_loss = (args.alpha * logp - q).mean()
        actor_opt.zero_grad(set_to_none=True)
        critic_scaler.scale(actor_loss).backward()  # <- here
        actor_scaler.step(actor_opt)
        actor_scaler.update()
        critics.requires_grad_(True)
        with torch.no_grad():
            for p, tp in zip(critics.parameters(), targets.parameters()):
                tp.lerp_(p, args.tau)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--env", default="HalfCheetah-v4")
    for name, default in dict(seed=0, steps=1_000_000, warmup=5000, batch_size=256).items():
        ap.add_argument(f"--{name}", type=int, default=default)
    for name, default in dict(gamma=0.99, tau=0.005, alpha=0.2).items():
        ap.add_argument(f"--{name}", type=float, default=default)
    main(ap.parse_args())
