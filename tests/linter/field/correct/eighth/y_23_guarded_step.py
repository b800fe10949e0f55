# why correct: when the guard refuses a step, update() still runs (so unscale_ is allowed again) and the gradients are zeroed in every case.
import collections
import statistics

import torch
import torch.nn.functional as F
from torch.amp import GradScaler, autocast


class SpikeGuard:
    """Refuses updates whose norm is far above the recent median."""

    def __init__(self, window=200, factor=8.0):
        self.recent = collections.deque(maxlen=window)
        self.factor = factor
        self.refused = 0

    def allows(self, norm):
        if norm != norm or norm == float("inf"):
            return False
        if len(self.recent) >= 50 and norm > self.factor * statistics.median(self.recent):
            self.refused += 1
            return False
        self.recent.append(norm)
        return True


class PolicyLearner:
    def __init__(self, policy, lr=3e-4, clip_range=0.2, value_weight=0.5, entropy=0.01, max_norm=0.5):
        self.policy = policy.cuda()
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=lr, eps=1e-5)
        self.scaler = GradScaler("cuda", growth_interval=500)
        self.guard = SpikeGuard()
        self.clip_range = clip_range
        self.value_weight = value_weight
        self.entropy = entropy
        self.max_norm = max_norm

    def loss(self, batch):
        with autocast("cuda", dtype=torch.float16):
            logits, value = self.policy(batch["obs"])
        logp_all = F.log_softmax(logits.float(), dim=-1)
        logp = logp_all.gather(1, batch["action"][:, None]).squeeze(1)
        ratio = (logp - batch["logp"]).exp()
        adv = batch["advantage"]
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        surrogate = torch.min(ratio * adv, ratio.clamp(1 - self.clip_range, 1 + self.clip_range) * adv).mean()
        value_loss = F.smooth_l1_loss(value.float().squeeze(1), batch["return"])
        entropy = -(logp_all.exp() * logp_all).sum(-1).mean()
        return -surrogate + self.value_weight * value_loss - self.entropy * entropy

    def update(self, batch):
        loss = self.loss(batch)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_norm).item()
        finite = norm == norm and norm != float("inf")
        if self.guard.allows(norm) or not finite:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return {"loss": loss.item(), "norm": norm, "refused": self.guard.refused, "scale": self.scaler.get_scale()}

    def state_dict(self):
        return {"policy": self.policy.state_dict(), "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state):
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])


def learn(envs, policy, rollouts, updates=1000, passes=4, minibatch=1024, path="ppo.pt"):
    learner = PolicyLearner(policy)
    for u in range(updates):
        policy.eval()
        data = rollouts(envs, policy)
        data = {k: v.cuda() for k, v in data.items()}
        policy.train()
        count = len(data["obs"])
        for _ in range(passes):
            for idx in torch.randperm(count, device="cuda").split(minibatch):
                logs = learner.update({k: v[idx] for k, v in data.items()})
        if u % 10 == 0:
            print(u, logs)
            torch.save(learner.state_dict(), path)
    return learner
