# source: X-GenGroup/Flow-Factory PR #186
# mistake: one autocast region spans many optimizer steps, so the cached bfloat16 copies of the float32 weights are never renewed and training stands still
# severity: error
from collections import deque

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self, obs, actions, width=512):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(obs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.pi = nn.Linear(width, actions)
        self.v = nn.Linear(width, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.pi(h).float(), self.v(h).float().squeeze(-1)


@torch.no_grad()
def rollout(envs, policy, obs, length, device):
    store = {k: [] for k in ("obs", "act", "logp", "rew", "done", "val")}
    for _ in range(length):
        x = torch.as_tensor(obs, dtype=torch.float32, device=device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits, value = policy(x)
        dist = Categorical(logits=logits)
        act = dist.sample()
        obs, rew, term, trunc, _ = envs.step(act.cpu().numpy())
        done = np.logical_or(term, trunc)
        for key, item in zip(store, (x, act, dist.log_prob(act), rew, done, value)):
            store[key].append(torch.as_tensor(item, device=device))
    return obs, {k: torch.stack(v).float() if k != "act" else torch.stack(v) for k, v in store.items()}


def advantages(data, last, gamma=0.99, lam=0.95):
    adv = torch.zeros_like(data["rew"])
    run = torch.zeros_like(last)
    for t in reversed(range(len(adv))):
        nxt = last if t == len(adv) - 1 else data["val"][t + 1]
        live = 1 - data["done"][t]
        delta = data["rew"][t] + gamma * nxt * live - data["val"][t]
        run = delta + gamma * lam * live * run
        adv[t] = run
    return adv, adv + data["val"]


def optimise(policy, optimizer, data, adv, ret, passes=4, chunk=1024, clip=0.2):
    flat = {k: v.flatten(0, 1) for k, v in data.items()}
    adv, ret = adv.flatten(), ret.flatten()
    adv = (adv - adv.mean()) / (adv.std() + 1e-6)
    with torch.autocast("cuda", dtype=torch.bfloat16):  # <- here
        for _ in range(passes):
            for idx in torch.randperm(len(adv), device=adv.device).split(chunk):
                logits, value = policy(flat["obs"][idx])
                dist = Categorical(logits=logits)
                ratio = (dist.log_prob(flat["act"][idx]) - flat["logp"][idx]).exp()
                gain = torch.min(ratio * adv[idx], ratio.clamp(1 - clip, 1 + clip) * adv[idx]).mean()
                loss = -gain + 0.5 * (value - ret[idx]).pow(2).mean() - 0.01 * dist.entropy().mean()
                optimizer.zero_grad()
                loss.backward()  # <- here
                nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                optimizer.step()  # <- here
    return loss.item()


def main(name="LunarLander-v3", count=32, updates=500, length=256, device="cuda"):
    envs = gym.make_vec(name, num_envs=count)
    policy = Policy(envs.single_observation_space.shape[0], envs.single_action_space.n).to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4, eps=1e-5)
    obs, _ = envs.reset(seed=0)
    recent = deque(maxlen=20)
    for u in range(updates):
        obs, data = rollout(envs, policy, obs, length, device)
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            last = policy(torch.as_tensor(obs, dtype=torch.float32, device=device))[1]
        adv, ret = advantages(data, last)
        loss = optimise(policy, optimizer, data, adv, ret)
        recent.append(data["rew"].sum(0).mean().item())
        print(u, round(loss, 4), round(sum(recent) / len(recent), 2))


if __name__ == "__main__":
    main()
