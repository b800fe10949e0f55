# source: https://github.com/X-GenGroup/Flow-Factory/pull/186
# mistake: one autocast context spans the whole optimisation loop, so the cached bfloat16 copies of the weights stay in use after optimizer.step() and the forward passes see stale weights
# severity: error
import torch
import torch.nn.functional as F
from torch import nn


class TokenPolicy(nn.Module):
    def __init__(self, vocab, dim=512, depth=6, heads=8, length=256):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.zeros(length, dim))
        block = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.trunk = nn.TransformerEncoder(block, depth)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        t = tokens.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(t, device=tokens.device)
        x = self.embed(tokens) + self.pos[:t]
        return self.head(self.trunk(x, mask=causal, is_causal=True))


def sequence_logp(policy, tokens):
    logits = policy(tokens[:, :-1]).float()
    return F.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def group_advantage(rewards, group):
    r = rewards.view(-1, group)
    return ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).view(-1)


class GroupTrainer:
    def __init__(self, policy, reference, reward_fn, group=8, lr=1e-6, beta=0.02, inner=4, micro=32):
        self.policy, self.reference, self.reward_fn = policy.cuda(), reference.cuda().eval(), reward_fn
        self.group, self.beta, self.inner, self.micro = group, beta, inner, micro
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=lr)

    def update(self, tokens, mask):
        rewards = self.reward_fn(tokens).cuda()
        advantage = group_advantage(rewards, self.group)
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            old = sequence_logp(self.policy, tokens)
            ref = sequence_logp(self.reference, tokens)

        stats = []
        with torch.autocast("cuda", dtype=torch.bfloat16):  # <- here
            for _ in range(self.inner):
                for idx in torch.randperm(tokens.shape[0], device=tokens.device).split(self.micro):
                    logp = sequence_logp(self.policy, tokens[idx])  # <- here
                    ratio = (logp - old[idx]).exp()
                    adv = advantage[idx, None]
                    gain = torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
                    gap = ref[idx] - logp
                    kl = gap.exp() - gap - 1
                    m = mask[idx, 1:]
                    loss = -((gain - self.beta * kl) * m).sum() / m.sum()
                    self.optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
                    self.optimizer.step()  # <- here
                    stats.append(loss.item())
        return sum(stats) / len(stats), rewards.mean().item()
