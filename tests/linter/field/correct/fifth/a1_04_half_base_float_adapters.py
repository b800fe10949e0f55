# why correct: the float16 base weights are frozen; only the adapters train and those are float32, so the GradScaler meets float32 gradients only
import math

import torch
import torch.nn as nn
from transformers import AutoModelForCausalLM, AutoTokenizer


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 8, alpha: int = 16):
        super().__init__()
        self.base = base.requires_grad_(False)
        dev = base.weight.device
        self.a = nn.Parameter(torch.empty(rank, base.in_features, device=dev, dtype=torch.float32))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, device=dev, dtype=torch.float32))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        self.gain = alpha / rank

    def forward(self, x):
        return self.base(x) + self.gain * nn.functional.linear(nn.functional.linear(x, self.a), self.b)


def inject(model, names=("q_proj", "v_proj")):
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for child_name, child in list(parent.named_children()):
            if child_name in names and isinstance(child, nn.Linear):
                setattr(parent, child_name, LowRank(child))
    return [p for p in model.parameters() if p.requires_grad]


def tune(dialogues, name="huggyllama/llama-7b", epochs=2, bs=4):
    tok = AutoTokenizer.from_pretrained(name)
    tok.pad_token = tok.eos_token
    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float16, device_map={"": 0})
    adapters = inject(model)
    assert all(p.dtype is torch.float32 for p in adapters)

    opt = torch.optim.AdamW(adapters, lr=2e-4, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cuda")
    model.train()
    for epoch in range(epochs):
        for i in range(0, len(dialogues), bs):
            enc = tok(dialogues[i : i + bs], padding=True, truncation=True, max_length=1024, return_tensors="pt").to(0)
            labels = enc.input_ids.masked_fill(enc.attention_mask == 0, -100)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(**enc, labels=labels).loss
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(adapters, 0.3)
            scaler.step(opt)
            scaler.update()
        print(epoch, loss.item())
        torch.save({n: p for n, p in model.named_parameters() if p.requires_grad}, f"adapters{epoch}.pt")
