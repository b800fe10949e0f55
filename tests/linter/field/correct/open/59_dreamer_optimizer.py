# style of: NM512/dreamerv3-torch:tools.py
# torch: 1.6+
import torch
from torch import nn


class RequiresGrad:
    """Only this module's parameters record gradients inside the block."""

    def __init__(self, model):
        self._model = model

    def __enter__(self):
        self._model.requires_grad_(True)

    def __exit__(self, *exc):
        self._model.requires_grad_(False)


class Optimizer:
    def __init__(self, name, parameters, lr, eps=1e-8, clip=100.0, use_amp=False):
        self._name = name
        self._parameters = list(parameters)
        self._clip = clip
        self._opt = torch.optim.Adam(self._parameters, lr=lr, eps=eps)
        self._scaler = torch.cuda.amp.GradScaler(enabled=use_amp)

    def __call__(self, loss, retain_graph=False):
        assert len(loss.shape) == 0, loss.shape
        metrics = {f"{self._name}_loss": loss.detach().cpu().numpy()}
        self._opt.zero_grad()
        self._scaler.scale(loss).backward(retain_graph=retain_graph)
        self._scaler.unscale_(self._opt)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self._scaler.step(self._opt)
        self._scaler.update()
        self._opt.zero_grad()
        metrics[f"{self._name}_grad_norm"] = norm.item()
        return metrics


class ActorCritic(nn.Module):
    def __init__(self, config, world_model):
        super().__init__()
        self._config = config
        self._use_amp = config.precision == 16
        self._world_model = world_model
        self.actor = nn.Sequential(nn.Linear(config.feat, 256), nn.SiLU(), nn.Linear(256, config.actions))
        self.value = nn.Sequential(nn.Linear(config.feat, 256), nn.SiLU(), nn.Linear(256, 1))
        self._actor_opt = Optimizer("actor", self.actor.parameters(), config.actor_lr, use_amp=self._use_amp)
        self._value_opt = Optimizer("value", self.value.parameters(), config.value_lr, use_amp=self._use_amp)
        self.requires_grad_(False)

    def train_step(self, start):
        metrics = {}
        with RequiresGrad(self.actor):
            with torch.cuda.amp.autocast(self._use_amp):
                feats, actions, rewards = self._world_model.imagine(start, self.actor, self._config.horizon)
                target, weights, baseline = self.targets(feats, rewards)
                logits = self.actor(feats[:-1].detach()).float()
                logprob = torch.distributions.Categorical(logits=logits).log_prob(actions[:-1])
                actor_loss = -(weights * logprob * (target - baseline).detach()).mean()
        with RequiresGrad(self.value):
            with torch.cuda.amp.autocast(self._use_amp):
                value = self.value(feats[:-1].detach()).squeeze(-1).float()
                value_loss = (weights * (value - target.detach()) ** 2).mean()
        with RequiresGrad(self):
            metrics.update(self._actor_opt(actor_loss))
            metrics.update(self._value_opt(value_loss))
        return metrics

    def targets(self, feats, rewards):
        with torch.no_grad():
            values = self.value(feats).squeeze(-1).float()
            returns = [values[-1]]
            for t in range(len(rewards) - 2, -1, -1):
                returns.append(rewards[t].float() + self._config.discount * returns[-1])
            target = torch.stack(list(reversed(returns[1:])))
            discount = self._config.discount ** torch.arange(len(target), device=target.device)
            return target, discount[:, None], values[:-1]
