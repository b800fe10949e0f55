# source: https://github.com/pytorch/pytorch/issues/40907
# mistake: the gradient norm is clipped while the gradients still carry the loss scale, so every update is shrunk to a tiny step
# severity: error
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributions import Categorical


@dataclass
class PPOConfig:
    obs_dim: int = 64
    n_actions: int = 12
    lr: float = 3e-4
    clip_ratio: float = 0.2
    value_weight: float = 0.5
    entropy_weight: float = 0.01
    max_grad_norm: float = 0.5
    passes: int = 4
    minibatch: int = 2048


class ActorCritic(nn.Module):
    def __init__(self, cfg: PPOConfig):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(cfg.obs_dim, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh())
        self.policy = nn.Linear(512, cfg.n_actions)
        self.value = nn.Linear(512, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.policy(h).float(), self.value(h).squeeze(-1).float()


class Learner:
    def __init__(self, cfg: PPOConfig):
        self.cfg = cfg
        self.net = ActorCritic(cfg).cuda()
        self.opt = torch.optim.Adam(self.net.parameters(), lr=cfg.lr, eps=1e-5)
        self.scaler = torch.cuda.amp.GradScaler()

    def losses(self, mb):
        logits, value = self.net(mb["obs"])
        dist = Categorical(logits=logits)
        ratio = (dist.log_prob(mb["actions"]) - mb["old_logp"]).exp()
        adv = mb["advantages"]
        clipped = ratio.clamp(1 - self.cfg.clip_ratio, 1 + self.cfg.clip_ratio)
        policy_loss = -torch.min(ratio * adv, clipped * adv).mean()
        value_loss = (value - mb["returns"]).pow(2).mean()
        return policy_loss + self.cfg.value_weight * value_loss - self.cfg.entropy_weight * dist.entropy().mean()

    def descend(self, loss):
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()  # <- here
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), self.cfg.max_grad_norm)  # <- here
        self.scaler.step(self.opt)
        self.scaler.update()
        return norm

    def improve(self, rollout):
        total = rollout["obs"].shape[0]
        history = []
        for _ in range(self.cfg.passes):
            order = torch.randperm(total, device="cuda")
            for chunk in order.split(self.cfg.minibatch):
                mb = {name: column[chunk] for name, column in rollout.items()}
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = self.losses(mb)
                self.descend(loss)
                history.append(loss.detach())
        return torch.stack(history).mean().item()
