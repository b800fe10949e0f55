# why correct: each forward opens its own autocast region, so no cached cast of the weights survives an optimizer step; backward and step lie outside and checkpointing recomputes under the same autocast
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Policy(nn.Module):
    def __init__(self, vocab, dim=512, depth=8):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(1024, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 8, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.act, self.value = nn.Linear(dim, vocab), nn.Linear(dim, 1)

    def forward(self, ids):
        t = ids.size(1)
        causal = torch.ones(t, t, dtype=torch.bool, device=ids.device).triu(1)
        x = self.emb(ids) + self.pos(torch.arange(t, device=ids.device))
        for layer in self.layers:
            if torch.is_grad_enabled():
                x = checkpoint(layer, x, causal, use_reentrant=False)
            else:
                x = layer(x, causal)
        return self.act(x).float(), self.value(x).float().squeeze(-1)


def low_precision(fn):
    def wrapped(*args, **kwargs):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return fn(*args, **kwargs)

    return wrapped


@low_precision
def evaluate(policy, ids):
    logits, value = policy(ids)
    logp = F.log_softmax(logits[:, :-1], -1)
    taken = logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return taken, value[:, :-1], entropy


def mean(x, m):
    return (x * m).sum() / m.sum().clamp(min=1)


def ppo(policy, opt, ids, keep, reward, epochs=4, clip=0.2):
    with torch.no_grad():
        old, baseline, _ = evaluate(policy, ids)
    target = reward[:, None].expand_as(baseline)
    adv = target - baseline
    adv = (adv - mean(adv, keep)) * torch.rsqrt(mean((adv - mean(adv, keep)) ** 2, keep) + 1e-8)
    for _ in range(epochs):
        new, value, entropy = evaluate(policy, ids)
        ratio = (new - old).exp()
        gain = torch.minimum(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
        loss = mean(-gain + 0.5 * (value - target) ** 2 - 0.01 * entropy, keep)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        opt.step()
    return loss.item()


def train(vocab, sampler, rounds=500):
    policy = Policy(vocab).cuda()
    opt = torch.optim.AdamW(policy.parameters(), lr=3e-5)
    for r in range(rounds):
        ids, keep, reward = sampler(policy)
        print(r, reward.mean().item(), ppo(policy, opt, ids, keep.float(), reward.float()))
