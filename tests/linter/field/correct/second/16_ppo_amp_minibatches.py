"""
# style of: vwxyzjn/cleanrl:cleanrl/ppo_atari.py
# correct: each minibatch is a full cycle of autocast, scale, unscale, clip, step, update; rollouts run under their own no_grad autocast block, apart from training.
# torch: 2.0+
"""
from dataclasses import dataclass

import gymnasium as gym
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions import Categorical


@dataclass
class Args:
    num_envs: int = 8
    num_steps: int = 128
    num_iterations: int = 1000
    update_epochs: int = 4
    minibatch: int = 256
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_coef: float = 0.1
    max_grad_norm: float = 0.5
    lr: float = 2.5e-4
    amp: bool = True


class Agent(nn.Module):
    def __init__(self, actions):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(),
        )
        self.actor, self.critic = nn.Linear(512, actions), nn.Linear(512, 1)

    def forward(self, obs, action=None):
        h = self.net(obs / 255.0)
        dist = Categorical(logits=self.actor(h).float())
        action = dist.sample() if action is None else action
        return action, dist.log_prob(action), dist.entropy(), self.critic(h).float().squeeze(-1)


def train(args: Args, envs: gym.vector.VectorEnv, device="cuda"):
    agent = Agent(envs.single_action_space.n).to(device)
    optimizer = optim.Adam(agent.parameters(), lr=args.lr, eps=1e-5)
    scaler = torch.amp.GradScaler(device, enabled=args.amp)
    amp_ctx = lambda: torch.autocast(device, dtype=torch.float16, enabled=args.amp)
    shape = (args.num_steps, args.num_envs)
    obs_b = torch.zeros(shape + envs.single_observation_space.shape, device=device)
    act_b, logp_b, rew_b, done_b, val_b = (torch.zeros(shape, device=device) for _ in range(5))
    next_obs = torch.as_tensor(envs.reset()[0], dtype=torch.float32, device=device)
    next_done = torch.zeros(args.num_envs, device=device)

    for iteration in range(args.num_iterations):
        for step in range(args.num_steps):
            obs_b[step], done_b[step] = next_obs, next_done
            with torch.no_grad(), amp_ctx():
                action, logp_b[step], _, val_b[step] = agent(next_obs)
            act_b[step] = action
            obs, reward, term, trunc, _ = envs.step(action.cpu().numpy())
            rew_b[step] = torch.as_tensor(reward, dtype=torch.float32, device=device)
            next_obs = torch.as_tensor(obs, dtype=torch.float32, device=device)
            next_done = torch.as_tensor(term | trunc, dtype=torch.float32, device=device)

        with torch.no_grad(), amp_ctx():
            next_val = agent(next_obs)[3]
        adv, last = torch.zeros_like(rew_b), 0.0
        for t in reversed(range(args.num_steps)):
            alive = 1.0 - (next_done if t == args.num_steps - 1 else done_b[t + 1])
            nv = next_val if t == args.num_steps - 1 else val_b[t + 1]
            delta = rew_b[t] + args.gamma * nv * alive - val_b[t]
            adv[t] = last = delta + args.gamma * args.gae_lambda * alive * last
        ret = (adv + val_b).flatten()
        b_obs, b_act, b_logp, b_adv = obs_b.flatten(0, 1), act_b.flatten(), logp_b.flatten(), adv.flatten()

        for _ in range(args.update_epochs):
            for mb in torch.randperm(len(b_act), device=device).split(args.minibatch):
                with amp_ctx():
                    _, logp, entropy, value = agent(b_obs[mb], b_act[mb].long())
                ratio = (logp - b_logp[mb]).exp()
                a = (b_adv[mb] - b_adv[mb].mean()) / (b_adv[mb].std() + 1e-8)
                pg = torch.max(-a * ratio, -a * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)).mean()
                loss = pg - 0.01 * entropy.mean() + 0.5 * (value - ret[mb]).pow(2).mean()
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                scaler.step(optimizer)
                scaler.update()
    return agent
