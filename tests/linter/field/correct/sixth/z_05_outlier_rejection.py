# why correct: a rejected step skips scaler.step() but still reaches update(), for which unscale_() has already recorded the inf checks
import math
from collections import deque
from statistics import median

import torch


class NormHistory:
    def __init__(self, size=200, factor=8.0):
        self.buf, self.factor = deque(maxlen=size), factor

    def outlier(self, norm):
        if not math.isfinite(norm):
            return False
        bad = len(self.buf) >= 50 and norm > self.factor * median(self.buf)
        self.buf.append(norm)
        return bad


def global_norm(params):
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.grad) for p in params if p.grad is not None]))


class Fitter:
    def __init__(self, policy, lr=1e-4, device="cuda"):
        self.policy = policy.to(device)
        self.params = [p for p in self.policy.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.params, lr=lr)
        self.scaler = torch.amp.GradScaler(device)
        self.history = NormHistory()
        self.device = device
        self.rejected = 0

    def behaviour_loss(self, obs, actions, pad):
        with torch.autocast(self.device, dtype=torch.float16):
            mean, log_std = self.policy(obs)
        mean, log_std = mean.float(), log_std.float().clamp(-5, 2)
        nll = 0.5 * ((actions - mean) / log_std.exp()).square() + log_std
        keep = (~pad).unsqueeze(-1).float()
        return (nll * keep).sum() / (keep.sum() * actions.shape[-1]).clamp(min=1)

    def step(self, obs, actions, pad):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.behaviour_loss(obs.to(self.device), actions.to(self.device), pad.to(self.device))
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = global_norm(self.params).item()
        if self.history.outlier(norm):
            self.rejected += 1
        else:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item(), norm

    def fit(self, loader, epochs):
        for e in range(epochs):
            for obs, actions, pad in loader:
                loss, norm = self.step(obs, actions, pad)
            print(f"epoch {e} loss {loss:.3f} norm {norm:.3f} rejected {self.rejected}")


if __name__ == "__main__":
    from robot import Demonstrations, GaussianPolicy

    Fitter(GaussianPolicy(obs=39, act=7)).fit(Demonstrations("demos.hdf5").loader(256), 100)
