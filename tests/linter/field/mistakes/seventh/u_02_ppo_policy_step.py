# source: https://github.com/huggingface/trl/pull/595
# mistake: with Accelerate in fp16 the gradients are clipped with torch's function, which sees them multiplied by the loss scale, instead of accelerator.clip_grad_norm_
# severity: error
import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ActorCritic(nn.Module):
    def __init__(self, obs_dim, n_actions, width=256):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs_dim, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.pi = nn.Linear(width, n_actions)
        self.v = nn.Linear(width, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.pi(h), self.v(h).squeeze(-1)


def ppo_loss(model, batch, clip_eps, vf_coef):
    obs, act, old_logp, adv, ret = batch
    logits, value = model(obs)
    logp = F.log_softmax(logits.float(), dim=-1).gather(1, act.unsqueeze(1)).squeeze(1)
    ratio = (logp - old_logp).exp()
    unclipped = ratio * adv
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps) * adv
    return -torch.min(unclipped, clipped).mean() + vf_coef * F.mse_loss(value.float(), ret)


def train_minibatch(accelerator, model, optimizer, batch, args):
    loss = ppo_loss(model, batch, args.clip_eps, args.vf_coef)
    accelerator.backward(loss)
    if args.max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)  # <- here
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def load_rollouts(path):
    d = torch.load(path)
    return TensorDataset(d["obs"], d["act"], d["logp"], d["adv"], d["ret"])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("rollouts")
    ap.add_argument("--lr", type=float, default=3e-4)
    ap.add_argument("--clip-eps", type=float, default=0.2)
    ap.add_argument("--vf-coef", type=float, default=0.5)
    ap.add_argument("--max-grad-norm", type=float, default=0.5)
    ap.add_argument("--epochs", type=int, default=4)
    args = ap.parse_args()

    accelerator = Accelerator(mixed_precision="fp16")
    model = ActorCritic(obs_dim=128, n_actions=18)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-5)
    loader = DataLoader(load_rollouts(args.rollouts), batch_size=512, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(args.epochs):
        model.train()
        for batch in loader:
            loss = train_minibatch(accelerator, model, optimizer, batch, args)
        accelerator.print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
