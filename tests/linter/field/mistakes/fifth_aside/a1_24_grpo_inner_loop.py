# source: X-GenGroup/Flow-Factory PR #186 ("per-forward autocast to avoid stale weight cache")
# mistake: one autocast region encloses several forward passes and the optimizer steps between them; autocast caches the bfloat16 copies of the float32 weights, so later passes still use the weights from before the step
# severity: error
import random

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer


def completion_logp(model, ids, mask, prompt_len):
    logits = model(input_ids=ids, attention_mask=mask).logits[:, prompt_len - 1 : -1]
    logp = F.log_softmax(logits.float(), dim=-1)
    return logp.gather(-1, ids[:, prompt_len:, None]).squeeze(-1)


class GroupOptimizer:
    def __init__(self, policy, tokenizer, scorer, lr=1e-6, group=8, reuse=4, clip=0.2):
        self.policy = policy
        self.tok = tokenizer
        self.scorer = scorer
        self.group, self.reuse, self.clip = group, reuse, clip
        self.opt = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)

    @torch.no_grad()
    def sample(self, prompt):
        enc = self.tok([prompt] * self.group, return_tensors="pt").to("cuda")
        n = enc.input_ids.size(1)
        self.policy.eval()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            ids = self.policy.generate(**enc, do_sample=True, max_new_tokens=256, top_k=0)
        texts = self.tok.batch_decode(ids[:, n:], skip_special_tokens=True)
        reward = torch.tensor([self.scorer(prompt, t) for t in texts], device="cuda")
        adv = (reward - reward.mean()) / (reward.std() + 1e-4)
        mask = torch.ones_like(ids)
        mask[:, n:] = ids[:, n:].ne(self.tok.pad_token_id)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            old = completion_logp(self.policy, ids, mask, n)
        return ids, mask, n, adv, old, reward.mean().item()

    def surrogate(self, ids, mask, n, adv, old):
        new = completion_logp(self.policy, ids, mask, n)
        ratio = torch.exp(new - old)
        bounded = ratio.clamp(1 - self.clip, 1 + self.clip)
        gain = torch.minimum(ratio * adv[:, None], bounded * adv[:, None])
        keep = mask[:, n:].float()
        return -((gain * keep).sum(1) / keep.sum(1).clamp(min=1)).mean()

    def improve(self, prompt):
        ids, mask, n, adv, old, reward = self.sample(prompt)
        self.policy.train()
        with torch.autocast("cuda", dtype=torch.bfloat16):  # <- here
            for _ in range(self.reuse):  # <- here
                loss = self.surrogate(ids, mask, n, adv, old)
                self.opt.zero_grad(set_to_none=True)
                loss.backward()  # <- here
                torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
                self.opt.step()  # <- here
        return reward


def main(prompts, scorer, name="Qwen/Qwen2.5-0.5B-Instruct", rounds=1000):
    tok = AutoTokenizer.from_pretrained(name, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float32).cuda()
    learner = GroupOptimizer(policy, tok, scorer)
    for r in range(rounds):
        reward = learner.improve(random.choice(prompts))
        if r % 10 == 0:
            print(f"round {r}: reward {reward:.3f}", flush=True)
        if r and r % 200 == 0:
            policy.save_pretrained(f"policy-{r}")
