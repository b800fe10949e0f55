# why correct: logits of the bfloat16 policy are widened to float32 before log_softmax, chunk by chunk, for both old and new log-probabilities
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM


def _chunk_logp(hidden, weight, target):
    logits = F.linear(hidden, weight).float()
    return -F.cross_entropy(logits, target, reduction="none")


def logp_of(model, ids, mask, prompt, chunk=2048):
    h = model.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, prompt - 1 : -1]
    flat, target = h.reshape(-1, h.size(-1)), ids[:, prompt:].reshape(-1)
    w = model.lm_head.weight
    parts = [
        checkpoint(_chunk_logp, flat[i : i + chunk], w, target[i : i + chunk], use_reentrant=False)
        for i in range(0, len(flat), chunk)
    ]
    return torch.cat(parts).view(ids.size(0), -1)


class Float32Master:
    def __init__(self, params, **kw):
        self.live = list(params)
        self.main = [torch.nn.Parameter(p.detach().float()) for p in self.live]
        self.adam = torch.optim.AdamW(self.main, **kw)

    def step(self, limit):
        for m, p in zip(self.main, self.live):
            m.grad = p.grad.float() if p.grad is not None else None
            p.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self.main, limit)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(self.live, self.main)
        return norm

    def state_dict(self):
        return {"adam": self.adam.state_dict(), "main": [m.detach() for m in self.main]}


def rloo(policy, reference, optimizer, batch, beta=0.03):
    ids, mask, n, reward = batch["ids"], batch["mask"], batch["prompt"], batch["reward"].float()
    keep = mask[:, n:].float()
    new = logp_of(policy, ids, mask, n)
    with torch.no_grad():
        ref = logp_of(reference, ids, mask, n)
        shaped = reward - beta * ((new.detach() - ref) * keep).sum(1)
        k = shaped.numel()
        baseline = (shaped.sum() - shaped) / (k - 1)
    loss = -((shaped - baseline) * (new * keep).sum(1)).mean()
    loss.backward()
    return loss.item(), optimizer.step(1.0).item()


def build(name="meta-llama/Llama-3.2-1B-Instruct"):
    policy = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16).cuda()
    reference = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16).cuda()
    reference.eval().requires_grad_(False)
    return policy, reference, Float32Master(policy.parameters(), lr=1e-6, weight_decay=0.0)
