# source: https://github.com/milesial/Pytorch-UNet/issues/468
# mistake: the gradient norm is clipped while the gradients still carry the loss scale, so every update is shrunk to a tiny norm after unscaling
# severity: error
"""PPO learner for the warehouse robot. Rollouts come from the actor processes as plain dicts."""
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.distributions import Categorical


@dataclass
class PPOConfig:
    clip_range: float = 0.2
    value_weight: float = 0.5
    entropy_weight: float = 0.01
    max_grad_norm: float = 0.5
    lr: float = 2.5e-4
    epochs: int = 4
    minibatch: int = 512


class ConvPolicy(nn.Module):
    def __init__(self, channels, n_actions):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(channels, 32, 8, stride=4), nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(64 * 9 * 9, 512), nn.ReLU(),
        )
        self.pi = nn.Linear(512, n_actions)
        self.v = nn.Linear(512, 1)

    def forward(self, obs):
        h = self.trunk(obs)
        return self.pi(h), self.v(h).squeeze(-1)


class Learner:
    def __init__(self, policy, cfg, device="cuda"):
        self.policy = policy.to(device)
        self.cfg = cfg
        self.device = device
        self.opt = torch.optim.Adam(self.policy.parameters(), lr=cfg.lr, eps=1e-5)
        self.loss_scaler = torch.cuda.amp.GradScaler()

    def _objective(self, mb):
        logits, value = self.policy(mb["obs"])
        dist = Categorical(logits=logits.float())
        ratio = (dist.log_prob(mb["act"]) - mb["logp"]).exp()
        clipped = ratio.clamp(1 - self.cfg.clip_range, 1 + self.cfg.clip_range)
        pg = -torch.min(ratio * mb["adv"], clipped * mb["adv"]).mean()
        vf = 0.5 * (value.float() - mb["ret"]).pow(2).mean()
        return pg + self.cfg.value_weight * vf - self.cfg.entropy_weight * dist.entropy().mean()

    def _apply(self, loss):
        self.opt.zero_grad(set_to_none=True)
        self.loss_scaler.scale(loss).backward()
        norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.cfg.max_grad_norm)  # <- here
        self.loss_scaler.step(self.opt)  # <- here
        self.loss_scaler.update()
        return norm

    def learn(self, rollout):
        n = rollout["obs"].shape[0]
        norms = []
        for _ in range(self.cfg.epochs):
            for idx in torch.randperm(n).split(self.cfg.minibatch):
                mb = {k: v[idx].to(self.device, non_blocking=True) for k, v in rollout.items()}
                mb["adv"] = (mb["adv"] - mb["adv"].mean()) / (mb["adv"].std() + 1e-8)
                with torch.cuda.amp.autocast():
                    loss = self._objective(mb)
                norms.append(self._apply(loss).item())
        return sum(norms) / len(norms)
