# source: areal-project/AReaL issue #1292 (fix: PR #1369); see also NVIDIA-NeMo/Automodel PR #3444
# mistake: the whole model is bfloat16 and torch's AdamW updates it directly at a small learning rate with no float32 master weights, so most updates round away
# severity: warning
# Continued pre-training on clinical notes (exported from a notebook).

# %%
import math
import pathlib

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM, AutoTokenizer

BASE = "Qwen/Qwen2.5-1.5B"
NOTES = pathlib.Path("/data/notes")
BLOCK = 2048
STEPS = 6000
ACCUM = 8
LR = 5e-6

# %%
tokenizer = AutoTokenizer.from_pretrained(BASE)


class Packed(IterableDataset):
    def __iter__(self):
        buf = []
        for f in sorted(NOTES.glob("*.txt")):
            buf += tokenizer(f.read_text()).input_ids + [tokenizer.eos_token_id]
            while len(buf) > BLOCK:
                yield torch.tensor(buf[: BLOCK + 1])
                buf = buf[BLOCK:]


loader = DataLoader(Packed(), batch_size=4)

# %%
model = AutoModelForCausalLM.from_pretrained(BASE, attn_implementation="sdpa")
model = model.to("cuda", dtype=torch.bfloat16)  # <- here
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.config.use_cache = False

no_decay, decay = [], []
for name, p in model.named_parameters():
    (no_decay if p.ndim < 2 else decay).append(p)
opt = torch.optim.AdamW(  # <- here
    [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
    lr=LR,
    betas=(0.9, 0.95),
)


def factor(step):
    warm = min(1.0, (step + 1) / 100)
    return warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / STEPS)))


sched = torch.optim.lr_scheduler.LambdaLR(opt, factor)

# %%
model.train()
stream = iter(loader)
for step in range(STEPS):
    total = 0.0
    for _ in range(ACCUM):
        try:
            block = next(stream)
        except StopIteration:
            stream = iter(loader)
            block = next(stream)
        block = block.cuda(non_blocking=True)
        logits = model(input_ids=block[:, :-1]).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), block[:, 1:].flatten())
        (loss / ACCUM).backward()
        total += loss.item() / ACCUM
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()  # <- here
    sched.step()
    opt.zero_grad(set_to_none=True)
    if step % 20 == 0:
        print(f"step {step} loss {total:.4f} ppl {math.exp(min(total, 20)):.1f}")

# %%
model.save_pretrained("qwen-clinical")
tokenizer.save_pretrained("qwen-clinical")
