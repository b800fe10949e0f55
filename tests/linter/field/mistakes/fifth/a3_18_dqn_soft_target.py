# source: https://github.com/d8ahazard/sd_dreambooth_extension/pull/1415
# mistake: the slowly moving target network is kept in float16, where a Polyak step of 0.001 is mostly rounded to nothing, so the target hardly follows
# severity: warning
import copy
import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F


class ConvQ(nn.Module):
    def __init__(self, frames, actions):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(frames, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(),
        )
        self.advantage = nn.Sequential(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, actions))
        self.value = nn.Sequential(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, x):
        h = self.features(x)
        a = self.advantage(h)
        return self.value(h) + a - a.mean(-1, keepdim=True)


class Replay:
    def __init__(self, size):
        self.rows = deque(maxlen=size)

    def add(self, *row):
        self.rows.append(row)

    def sample(self, n):
        obs, act, rew, nxt, done = zip(*random.sample(self.rows, n))
        return (
            torch.stack(obs).cuda().float().div(255), torch.tensor(act).cuda(), torch.tensor(rew).cuda(),
            torch.stack(nxt).cuda().float().div(255), torch.tensor(done, dtype=torch.float32).cuda(),
        )


class Agent:
    def __init__(self, frames, actions, tau=0.001, gamma=0.99, lr=1e-4):
        self.online = ConvQ(frames, actions).cuda()
        self.target = copy.deepcopy(self.online).half().eval()  # <- here
        for p in self.target.parameters():
            p.requires_grad_(False)
        self.tau, self.gamma = tau, gamma
        self.opt = torch.optim.Adam(self.online.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cuda")

    @torch.no_grad()
    def follow(self):
        for slow, fast in zip(self.target.parameters(), self.online.parameters()):
            slow.lerp_(fast.half(), self.tau)  # <- here

    def learn(self, batch):
        obs, act, rew, nxt, done = batch
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            best = self.online(nxt).argmax(-1, keepdim=True)
        with torch.no_grad():
            bootstrap = self.target(nxt.half()).gather(-1, best).squeeze(-1).float()
            goal = rew + self.gamma * (1 - done) * bootstrap
        with torch.autocast("cuda", dtype=torch.float16):
            q = self.online(obs).gather(-1, act[:, None]).squeeze(-1)
            loss = F.smooth_l1_loss(q.float(), goal)
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.online.parameters(), 10.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.follow()
        return loss.item()
