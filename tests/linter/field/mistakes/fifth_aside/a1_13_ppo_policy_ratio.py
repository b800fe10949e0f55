# source: OpenRLHF/OpenRLHF PR #634 (same kind: jingyaogong/minimind PR #814)
# mistake: log-probabilities for the PPO ratio and KL are computed by log_softmax on bfloat16 logits, whose rounding makes the ratio differ from 1 and the clip null gradients at random
# severity: warning
import copy
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass
class PPO:
    clip: float = 0.2
    kl: float = 0.05
    lr: float = 1e-6
    inner_epochs: int = 2
    max_new: int = 128
    grad_norm: float = 1.0


def token_logp(model, ids, mask):
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    logp = torch.log_softmax(logits, dim=-1)  # <- here
    return logp.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)  # <- here


def masked_mean(x, m):
    return (x * m).sum() / m.sum().clamp(min=1)


class MasterAdam:
    """AdamW on float32 copies of 16-bit parameters."""

    def __init__(self, params, lr):
        self.live = [p for p in params if p.requires_grad]
        self.master = [p.detach().float().clone().requires_grad_() for p in self.live]
        self.inner = torch.optim.AdamW(self.master, lr=lr, weight_decay=0.0)

    def zero(self):
        for p in self.live:
            p.grad = None

    def step(self, max_norm):
        for m, p in zip(self.master, self.live):
            m.grad = None if p.grad is None else p.grad.float()
        nn.utils.clip_grad_norm_(self.master, max_norm)
        self.inner.step()
        with torch.no_grad():
            for m, p in zip(self.master, self.live):
                p.copy_(m)


class Aligner:
    def __init__(self, name, reward_fn, cfg=PPO(), device="cuda"):
        self.cfg, self.device, self.reward_fn = cfg, device, reward_fn
        self.tok = AutoTokenizer.from_pretrained(name, padding_side="left")
        self.actor = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16).to(device)  # <- here
        self.ref = copy.deepcopy(self.actor).eval().requires_grad_(False)
        self.opt = MasterAdam(self.actor.parameters(), cfg.lr)

    @torch.no_grad()
    def rollout(self, prompts):
        enc = self.tok(prompts, return_tensors="pt", padding=True).to(self.device)
        self.actor.eval()
        ids = self.actor.generate(**enc, do_sample=True, top_k=0, max_new_tokens=self.cfg.max_new)
        start = enc.input_ids.size(1)
        alive = ids[:, start:].ne(self.tok.pad_token_id)
        mask = torch.cat([enc.attention_mask, alive.long()], dim=1)
        act = torch.zeros_like(ids, dtype=torch.bool)
        act[:, start:] = alive
        reward = self.reward_fn(self.tok.batch_decode(ids, skip_special_tokens=True)).float().to(self.device)
        adv = (reward - reward.mean()) / (reward.std() + 1e-6)
        old = token_logp(self.actor, ids, mask)
        ref = token_logp(self.ref, ids, mask)
        return ids, mask, act[:, 1:].float(), adv, old, ref

    def update(self, prompts):
        ids, mask, act, adv, old, ref = self.rollout(prompts)
        for _ in range(self.cfg.inner_epochs):
            new = token_logp(self.actor, ids, mask)
            ratio = (new - old).exp()
            gain = torch.min(ratio * adv[:, None], ratio.clamp(1 - self.cfg.clip, 1 + self.cfg.clip) * adv[:, None])
            gap = ref - new
            kl = gap.exp() - gap - 1
            loss = masked_mean(-gain + self.cfg.kl * kl, act)
            self.opt.zero()
            loss.backward()
            self.opt.step(self.cfg.grad_norm)
        return loss.item()
