# source: https://github.com/mosaicml/llm-foundry/pull/302
# mistake: a torch.device is handed to autocast instead of its type string, which raises ValueError.
# severity: error
# torch: >= 2.1 (2.13: ValueError)
import argparse
from typing import Optional

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Finetuner:
    def __init__(self, name: str, device: Optional[str], autocast_dtype: Optional[str], lr: float = 1e-5):
        self.device = torch.device(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self.model = AutoModelForCausalLM.from_pretrained(name).to(self.device)
        self.dtype = DTYPES[autocast_dtype or "fp32"]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype is torch.float16)

    def context(self):
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.dtype is not torch.float32)  # <- here

    def step(self, texts):
        self.model.train()
        enc = self.tokenizer(texts, return_tensors="pt", padding=True, truncation=True).to(self.device)
        labels = enc["input_ids"].masked_fill(enc["attention_mask"] == 0, -100)
        self.optimizer.zero_grad()
        with self.context():
            logits = self.model(**enc).logits[:, :-1]
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--name", default="mosaicml/mpt-1b")
    p.add_argument("--device", default=None)
    p.add_argument("--autocast_dtype", default="bf16", choices=sorted(DTYPES))
    p.add_argument("--text", default="corpus.txt")
    a = p.parse_args()
    tuner = Finetuner(a.name, a.device, a.autocast_dtype)
    with open(a.text) as f:
        lines = f.read().splitlines()
    for start in range(0, len(lines), 8):
        print(tuner.step(lines[start : start + 8]))
