# re-expressed from github.com/billy-enrizky/openbrowser-ai pull 63: policy log-probabilities were taken with log_softmax over a 150k vocabulary in bfloat16
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewards import score_answers
from tasks import load_math_prompts


@dataclass
class GRPOConfig:
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    prompts_per_step: int = 8
    group: int = 8
    inner_epochs: int = 2
    micro: int = 8
    max_new: int = 512
    lr: float = 1e-6
    clip: float = 0.2
    kl: float = 0.02
    steps: int = 500
    gen: dict = field(default_factory=lambda: {"do_sample": True, "temperature": 1.0, "top_p": 1.0})


def token_logprobs(logits, tokens):
    logp = F.log_softmax(logits, dim=-1)  # <- here
    return logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


class GRPO:
    def __init__(self, cfg):
        self.cfg = cfg
        self.tok = AutoTokenizer.from_pretrained(cfg.model, padding_side="left")
        self.policy = AutoModelForCausalLM.from_pretrained(cfg.model, torch_dtype=torch.float32).cuda()
        self.ref = AutoModelForCausalLM.from_pretrained(cfg.model, torch_dtype=torch.bfloat16).cuda().eval()
        self.ref.requires_grad_(False)
        self.opt = torch.optim.AdamW(self.policy.parameters(), lr=cfg.lr, weight_decay=0.0)
        self.prompts = iter(load_math_prompts())

    def score(self, model, seq, mask, n_prompt):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(input_ids=seq, attention_mask=mask).logits
        return token_logprobs(logits[:, n_prompt - 1:-1], seq[:, n_prompt:])

    @torch.no_grad()
    def rollout(self):
        items = [next(self.prompts) for _ in range(self.cfg.prompts_per_step)]
        texts = [it["prompt"] for it in items for _ in range(self.cfg.group)]
        enc = self.tok(texts, return_tensors="pt", padding=True).to("cuda")
        self.policy.eval()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            seq = self.policy.generate(
                **enc, max_new_tokens=self.cfg.max_new, pad_token_id=self.tok.pad_token_id, **self.cfg.gen
            )
        self.policy.train()
        n = enc.input_ids.size(1)
        new = seq[:, n:]
        ended = (new == self.tok.eos_token_id).long().cumsum(-1)
        keep = (ended - (new == self.tok.eos_token_id).long()) == 0
        mask = torch.cat([enc.attention_mask, keep.long()], dim=1)
        answers = self.tok.batch_decode(new, skip_special_tokens=True)
        gold = [it["answer"] for it in items for _ in range(self.cfg.group)]
        reward = torch.tensor(score_answers(answers, gold), dtype=torch.float32, device="cuda")
        grouped = reward.view(-1, self.cfg.group)
        adv = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).flatten()
        chunks = list(zip(seq.split(self.cfg.micro), mask.split(self.cfg.micro)))
        old = torch.cat([self.score(self.policy, s, m, n) for s, m in chunks])
        ref = torch.cat([self.score(self.ref, s, m, n) for s, m in chunks])
        return {"seq": seq, "mask": mask, "keep": keep, "adv": adv, "old": old, "ref": ref}, n, reward.mean().item()

    def loss(self, mb, n):
        new = self.score(self.policy, mb["seq"], mb["mask"], n)
        ratio = (new - mb["old"]).exp()
        adv = mb["adv"][:, None]
        surrogate = torch.min(ratio * adv, ratio.clamp(1 - self.cfg.clip, 1 + self.cfg.clip) * adv)
        delta = mb["ref"] - new
        kl = delta.exp() - delta - 1
        per_token = (self.cfg.kl * kl - surrogate) * mb["keep"]
        return per_token.sum() / mb["keep"].sum().clamp(min=1)

    def train(self):
        for step in range(self.cfg.steps):
            buf, n, reward = self.rollout()
            total = buf["seq"].size(0)
            for _ in range(self.cfg.inner_epochs):
                for idx in torch.randperm(total, device="cuda").split(self.cfg.micro):
                    loss = self.loss({k: v[idx] for k, v in buf.items()}, n)
                    self.opt.zero_grad(set_to_none=True)
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
                    self.opt.step()
            print(f"{step} reward {reward:.3f} loss {loss.item():.4f}")
        self.policy.save_pretrained("out/grpo")


if __name__ == "__main__":
    GRPO(GRPOConfig()).train()
