import os
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

from gridworld import VectorEnv

C = SimpleNamespace(
    envs=64, horizon=128, updates=4000, epochs=4, mb=1024, gamma=0.99, lam=0.95, clip=0.2, ent=0.01,
    lr_pi=3e-4, lr_v=1e-3, max_norm=0.5, spike=50.0, ckpt="ppo.pt",
)
DEV = "cuda"


def trunk(cin, out):
    return nn.Sequential(
        nn.Conv2d(cin, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, out),
    )


env = VectorEnv(C.envs)
actor, critic = trunk(env.channels, env.actions).to(DEV), trunk(env.channels, 1).to(DEV)
opt_pi = torch.optim.Adam(actor.parameters(), lr=C.lr_pi, eps=1e-5)
opt_v = torch.optim.Adam(critic.parameters(), lr=C.lr_v, eps=1e-5)
scaler = torch.amp.GradScaler(DEV)
saved = {"actor": actor, "critic": critic, "opt_pi": opt_pi, "opt_v": opt_v, "scaler": scaler}
start = 0
if os.path.exists(C.ckpt):
    blob = torch.load(C.ckpt, map_location=DEV, weights_only=True)
    for k, obj in saved.items():
        obj.load_state_dict(blob[k])
    start = blob["update"] + 1


def policy(obs, legal):
    with torch.autocast(DEV, dtype=torch.float16):
        logits = actor(obs)
    return Categorical(logits=logits.float().masked_fill(~legal, -1e9))


def value(obs):
    with torch.autocast(DEV, dtype=torch.float16):
        return critic(obs).float().squeeze(-1)


@torch.no_grad()
def collect(obs, legal):
    keys = ("obs", "legal", "act", "logp", "val", "rew", "done")
    buf = {k: [] for k in keys}
    for _ in range(C.horizon):
        dist = policy(obs, legal)
        act = dist.sample()
        nxt, nxt_legal, rew, done = env.step(act)
        for k, v in zip(keys, (obs, legal, act, dist.log_prob(act), value(obs), rew, done.float())):
            buf[k].append(v)
        obs, legal = nxt, nxt_legal
    buf = {k: torch.stack(v) for k, v in buf.items()}
    adv, last, next_val = torch.zeros_like(buf["rew"]), 0.0, value(obs)
    for t in reversed(range(C.horizon)):
        live = 1.0 - buf["done"][t]
        delta = buf["rew"][t] + C.gamma * next_val * live - buf["val"][t]
        last = delta + C.gamma * C.lam * live * last
        adv[t], next_val = last, buf["val"][t]
    buf["adv"], buf["ret"] = adv, adv + buf["val"]
    return {k: v.flatten(0, 1) for k, v in buf.items()}, obs, legal


def update(b):
    dist = policy(b["obs"], b["legal"])
    ratio = (dist.log_prob(b["act"]) - b["logp"]).exp()
    adv = (b["adv"] - b["adv"].mean()) / (b["adv"].std() + 1e-8)
    pi_loss = -torch.min(ratio * adv, ratio.clamp(1 - C.clip, 1 + C.clip) * adv).mean() - C.ent * dist.entropy().mean()
    v_loss = F.smooth_l1_loss(value(b["obs"]), b["ret"])
    opt_pi.zero_grad(set_to_none=True)
    opt_v.zero_grad(set_to_none=True)
    scaler.scale(pi_loss).backward()
    scaler.scale(v_loss).backward()
    scaler.unscale_(opt_pi)
    scaler.unscale_(opt_v)
    norm = nn.utils.clip_grad_norm_(actor.parameters(), C.max_norm)
    nn.utils.clip_grad_norm_(critic.parameters(), C.max_norm)
    if not (torch.isfinite(norm) and norm > C.spike):
        scaler.step(opt_pi)
    scaler.step(opt_v)
    scaler.update()
    return pi_loss.item(), v_loss.item()


obs, legal = env.reset()
for u in range(start, C.updates):
    data, obs, legal = collect(obs, legal)
    for _ in range(C.epochs):
        for idx in torch.randperm(C.envs * C.horizon, device=DEV).split(C.mb):
            losses = update({k: v[idx] for k, v in data.items()})
    if u % 20 == 0:
        print(f"{u} return {env.mean_return():.2f} pi {losses[0]:.4f} v {losses[1]:.4f} scale {scaler.get_scale():.0f}")
        torch.save({**{k: o.state_dict() for k, o in saved.items()}, "update": u}, C.ckpt)
