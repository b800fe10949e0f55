"""Full fine-tune of a causal LM: weights resident in bfloat16, AdamW on float32 copies that live on the CPU."""
import math
import os
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from packing import packed_batches

model_name = "meta-llama/Llama-3.2-1B"
out = "out/cpt"
dtype = "bfloat16"
block, micro, accum, steps = 4096, 2, 32, 3000
peak_lr, warmup = 5e-6, 100

pt_dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
device = "cuda"
torch.manual_seed(1337)


class MasterAdamW:
    def __init__(self, params, **kw):
        self.live = [p for p in params if p.requires_grad]
        self.master = [p.detach().float().cpu().requires_grad_(True) for p in self.live]
        self.inner = torch.optim.AdamW(self.master, **kw)
        self.acc = [torch.zeros_like(m) for m in self.master]

    def absorb(self, weight):
        for p, a in zip(self.live, self.acc):
            if p.grad is not None:
                a.add_(p.grad.float().cpu(), alpha=weight)
                p.grad = None

    @torch.no_grad()
    def step(self, lr, max_norm):
        for m, a in zip(self.master, self.acc):
            m.grad = a
        norm = torch.nn.utils.clip_grad_norm_(self.master, max_norm)
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.inner.step()
        for p, m, a in zip(self.live, self.master, self.acc):
            p.copy_(m)
            m.grad = None
            a.zero_()
        return norm

    def state_dict(self):
        return {"master": [m.detach() for m in self.master], "inner": self.inner.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state):
        for p, m, saved in zip(self.live, self.master, state["master"]):
            m.copy_(saved)
            p.copy_(m)
        self.inner.load_state_dict(state["inner"])


def lr_for(step):
    if step < warmup:
        return peak_lr * (step + 1) / warmup
    return 0.5 * peak_lr * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


tok = AutoTokenizer.from_pretrained(model_name)
model = AutoModelForCausalLM.from_pretrained(model_name, torch_dtype=pt_dtype).to(device)
model.gradient_checkpointing_enable()
model.train()
opt = MasterAdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8)
ctx = nullcontext() if dtype == "float32" else torch.autocast(device, dtype=pt_dtype)
batches = packed_batches("data/domain", tok, block, micro)

step = 0
path = f"{out}/resume.pt"
os.makedirs(out, exist_ok=True)
if os.path.exists(path):
    blob = torch.load(path, map_location="cpu", weights_only=True)
    opt.load_state_dict(blob["opt"])
    step = blob["step"]
    batches.seek(blob["position"])

while step < steps:
    total = 0.0
    for _ in range(accum):
        ids = next(batches).to(device)
        with ctx:
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        opt.absorb(1.0 / accum)
        total += loss.item() / accum
    norm = opt.step(lr_for(step), max_norm=1.0)
    step += 1
    if step % 10 == 0:
        print(f"step {step} loss {total:.4f} norm {norm.item():.3f} lr {lr_for(step):.2e}")
    if step % 250 == 0:
        torch.save({"opt": opt.state_dict(), "step": step, "position": batches.tell()}, path)

model.save_pretrained(out)
tok.save_pretrained(out)
