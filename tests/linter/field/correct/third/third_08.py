import argparse

import gymnasium as gym
import torch
import torch.nn as nn
from torch.distributions import Categorical


class ActorCritic(nn.Module):
    def __init__(self, n_actions):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
        )
        self.pi, self.v = nn.Linear(512, n_actions), nn.Linear(512, 1)

    def forward(self, obs):
        h = self.body(obs / 255.0)
        return self.pi(h).float(), self.v(h).float().squeeze(-1)


def gae(rewards, values, dones, last_value, gamma=0.99, lam=0.95):
    adv, running = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        nxt = last_value if t == len(rewards) - 1 else values[t + 1]
        delta = rewards[t] + gamma * nxt * (1 - dones[t]) - values[t]
        running = delta + gamma * lam * (1 - dones[t]) * running
        adv[t] = running
    return adv


def main(args):
    envs = gym.vector.SyncVectorEnv([
        lambda: gym.wrappers.FrameStackObservation(
            gym.wrappers.AtariPreprocessing(gym.make(args.env, frameskip=1)), 4)
        for _ in range(args.n_envs)])
    net = ActorCritic(envs.single_action_space.n).cuda()
    opt = torch.optim.Adam(net.parameters(), lr=2.5e-4, eps=1e-5)
    use_bf16 = torch.cuda.is_bf16_supported()
    amp = torch.autocast("cuda", dtype=torch.bfloat16 if use_bf16 else torch.float16)
    scaler = torch.amp.GradScaler("cuda", enabled=not use_bf16)
    obs = torch.as_tensor(envs.reset(seed=0)[0]).cuda()
    for update in range(args.updates):
        roll = {k: [] for k in ("obs", "act", "logp", "val", "rew", "done")}
        for _ in range(args.horizon):
            with torch.no_grad(), amp:
                logits, val = net(obs.float())
            dist = Categorical(logits=logits)
            act = dist.sample()
            nxt, rew, term, trunc, _ = envs.step(act.cpu().numpy())
            done = torch.as_tensor(term | trunc).float().cuda()
            items = (obs, act, dist.log_prob(act), val, torch.as_tensor(rew).float().cuda(), done)
            for buf, item in zip(roll.values(), items):
                buf.append(item)
            obs = torch.as_tensor(nxt).cuda()
        with torch.no_grad(), amp:
            last = net(obs.float())[1]
        data = {k: torch.stack(v) for k, v in roll.items()}
        data["adv"] = gae(data["rew"], data["val"], data["done"], last)
        data["ret"] = data["adv"] + data["val"]
        flat = {k: v.flatten(0, 1) for k, v in data.items()}
        for _ in range(args.epochs):
            for idx in torch.randperm(flat["act"].numel(), device="cuda").split(args.minibatch):
                mb = {k: v[idx] for k, v in flat.items()}
                with amp:
                    logits, val = net(mb["obs"].float())
                dist = Categorical(logits=logits)
                ratio = (dist.log_prob(mb["act"]) - mb["logp"]).exp()
                adv = (mb["adv"] - mb["adv"].mean()) / (mb["adv"].std() + 1e-8)
                pg = -torch.min(ratio * adv, ratio.clamp(0.9, 1.1) * adv).mean()
                loss = pg + 0.5 * (val - mb["ret"]).pow(2).mean() - 0.01 * dist.entropy().mean()
                for p in net.parameters():
                    p.grad = None
                scaler.scale(loss).backward()
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                scaler.step(opt)
                scaler.update()
        print(f"update {update} loss {loss.item():.4f}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--env", default="ALE/Breakout-v5")
    for name, default in dict(n_envs=8, horizon=128, epochs=4, minibatch=256, updates=10_000).items():
        ap.add_argument(f"--{name}", type=int, default=default)
    main(ap.parse_args())
