# why correct: the float16 base is frozen; only the adapters train, and they are cast to float32 before the optimizer is made, so the scaler finds float32 gradients.
import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup

from notes.data import Notes, pad_collate


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear, rank=16, alpha=32, drop=0.05):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.empty(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        self.drop = nn.Dropout(drop)
        self.gain = alpha / rank

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(self.drop(x), self.a), self.b) * self.gain


def insert(model, suffixes):
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.endswith(suffixes):
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], LowRank(module))
    return model


def prepare(name, suffixes=("q_proj", "v_proj")):
    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float16)
    model.requires_grad_(False)
    model = insert(model, suffixes).cuda()
    adapters = []
    for module in model.modules():
        if isinstance(module, LowRank):
            module.a.data = module.a.data.float()
            module.b.data = module.b.data.float()
            adapters += [module.a, module.b]
    for p in adapters:
        p.requires_grad_(True)
    return model, adapters


def adapter_state(model):
    return {k: v.cpu() for k, v in model.state_dict().items() if k.endswith((".a", ".b"))}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="facebook/opt-2.7b")
    ap.add_argument("--notes", required=True)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--accumulate", type=int, default=8)
    a = ap.parse_args()
    tok = AutoTokenizer.from_pretrained(a.model)
    model, adapters = prepare(a.model)
    loader = DataLoader(Notes(a.notes, tok), 2, shuffle=True, collate_fn=pad_collate(tok), drop_last=True)
    per_epoch = len(loader) // a.accumulate
    optimizer = torch.optim.AdamW(adapters, lr=2e-4, weight_decay=0.0)
    plan = get_linear_schedule_with_warmup(optimizer, 50, per_epoch * a.epochs)
    scaler = torch.cuda.amp.GradScaler()

    for epoch in range(a.epochs):
        model.train()
        for i, batch in enumerate(loader):
            if i == per_epoch * a.accumulate:
                break
            ids, mask, labels = (t.cuda() for t in batch)
            with torch.cuda.amp.autocast():
                logits = model(input_ids=ids, attention_mask=mask).logits
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
            scaler.scale(loss / a.accumulate).backward()
            if (i + 1) % a.accumulate:
                continue
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(adapters, 0.3)
            scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() >= scale:
                plan.step()
            optimizer.zero_grad(set_to_none=True)
            if (i + 1) % (a.accumulate * 20) == 0:
                print(f"epoch {epoch} {i + 1}/{len(loader)} loss {loss.item():.4f}")
        torch.save(adapter_state(model), f"adapters_{epoch}.pt")


if __name__ == "__main__":
    main()
