# why correct: the helper unscales the optimizer's gradients before clip_grad_norm_, and step/update follow once per backward
"""Double DQN with half-precision convolutions; the update lives in a free function shared with the offline variant."""
import copy
import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F


def qnet(channels, actions):
    return nn.Sequential(
        nn.Conv2d(channels, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(64 * 9 * 9, 512), nn.ReLU(), nn.Linear(512, actions))


def apply_gradients(loss, optimizer, parameters, amp_scaler, limit):
    optimizer.zero_grad(set_to_none=True)
    amp_scaler.scale(loss).backward()
    if limit is not None:
        amp_scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(parameters, limit)
    else:
        norm = None
    amp_scaler.step(optimizer)
    amp_scaler.update()
    return norm


class Replay:
    def __init__(self, size):
        self.data = deque(maxlen=size)

    def push(self, *item):
        self.data.append(item)

    def draw(self, n):
        obs, act, rew, nxt, done = zip(*random.sample(self.data, n))
        return (torch.stack(obs), torch.tensor(act), torch.tensor(rew, dtype=torch.float32),
                torch.stack(nxt), torch.tensor(done, dtype=torch.float32))


class Agent:
    def __init__(self, channels, actions, gamma=0.99, lr=6.25e-5, limit=10.0, sync=8000):
        self.online = qnet(channels, actions).cuda()
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.opt = torch.optim.Adam(self.online.parameters(), lr=lr, eps=1.5e-4)
        self.amp_scaler = torch.amp.GradScaler("cuda", init_scale=2.0 ** 12)
        self.gamma, self.limit, self.sync, self.n = gamma, limit, sync, 0

    def update(self, replay, batch=32):
        obs, act, rew, nxt, done = (t.cuda() for t in replay.draw(batch))
        obs, nxt = obs.float() / 255, nxt.float() / 255
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            best = self.online(nxt).argmax(1, keepdim=True)
            boot = self.target(nxt).gather(1, best).squeeze(1).float()
        goal = rew + self.gamma * (1 - done) * boot
        with torch.autocast("cuda", dtype=torch.float16):
            q = self.online(obs).gather(1, act[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(q.float(), goal)
        norm = apply_gradients(loss, self.opt, self.online.parameters(), self.amp_scaler, self.limit)
        self.n += 1
        if self.n % self.sync == 0:
            self.target.load_state_dict(self.online.state_dict())
        return loss.item(), norm.item()
