# source: X-GenGroup/Flow-Factory PR #186 https://github.com/X-GenGroup/Flow-Factory/pull/186
# mistake: one autocast block spans all inner optimizer steps; its cached bfloat16 weight casts are stale after step(), so the forward never changes
# severity: error
import torch
import torch.nn.functional as F
from torch import nn


class FlowPolicy(nn.Module):
    def __init__(self, obs=64, act=8, width=512):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(obs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, act * 2)
        )

    def forward(self, obs):
        mean, log_std = self.net(obs).float().chunk(2, -1)
        return torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())


class GroupPolicyTrainer:
    def __init__(self, policy, inner_epochs=4, clip=0.2, lr=3e-5):
        self.policy = policy.cuda()
        self.inner_epochs = inner_epochs
        self.clip = clip
        self.opt = torch.optim.AdamW(self.policy.parameters(), lr=lr)

    def autocast(self):
        return torch.autocast("cuda", dtype=torch.bfloat16)

    @torch.no_grad()
    def act(self, obs):
        with self.autocast():
            dist = self.policy(obs)
        a = dist.sample()
        return a, dist.log_prob(a).sum(-1)

    def optimize(self, memory):
        obs, act, old, reward = memory
        group = reward.view(-1, 8)
        adv = ((group - group.mean(1, keepdim=True)) / (group.std(1, keepdim=True) + 1e-4)).flatten()
        stats = []
        with self.autocast():  # <- here
            for _ in range(self.inner_epochs):
                for idx in torch.randperm(len(obs), device=obs.device).split(256):
                    logp = self.policy(obs[idx]).log_prob(act[idx]).sum(-1)
                    ratio = (logp - old[idx]).exp()
                    a = adv[idx]
                    loss = -torch.min(ratio * a, ratio.clamp(1 - self.clip, 1 + self.clip) * a).mean()
                    self.opt.zero_grad()
                    loss.backward()  # <- here
                    nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
                    self.opt.step()  # <- here
                    stats.append(loss.detach())
        return torch.stack(stats).mean().item()

    def run(self, env, rounds):
        for r in range(rounds):
            obs = env.observations(repeat=8).cuda()
            act, old = self.act(obs)
            reward = env.score(obs, act).cuda()
            print(r, self.optimize((obs, act, old, reward)), reward.mean().item())


if __name__ == "__main__":
    from bandit_env import Env

    GroupPolicyTrainer(FlowPolicy()).run(Env(), rounds=1000)
