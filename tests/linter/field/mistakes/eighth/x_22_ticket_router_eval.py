# source: h2oai/h2o-llmstudio issue #233
# mistake: the bfloat16 probabilities of the autocast region are converted with numpy(), which does not know bfloat16 and raises
# severity: error
from typing import Dict, List

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score, f1_score
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer

from tickets.io import read_tickets


class Router(torch.nn.Module):
    def __init__(self, name: str, queues: int):
        super().__init__()
        self.backbone = AutoModel.from_pretrained(name)
        self.drop = torch.nn.Dropout(0.1)
        self.out = torch.nn.Linear(self.backbone.config.hidden_size, queues)

    def forward(self, input_ids, attention_mask):
        hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.out(self.drop(hidden[:, 0]))


def collator(name: str):
    tok = AutoTokenizer.from_pretrained(name)

    def run(rows: List[dict]):
        enc = tok([r["text"] for r in rows], truncation=True, max_length=384, padding=True, return_tensors="pt")
        return dict(enc), torch.tensor(np.stack([r["queues"] for r in rows]), dtype=torch.float32)

    return run


def to_device(enc, device="cuda"):
    return {k: v.to(device) for k, v in enc.items() if k in ("input_ids", "attention_mask")}


def train_epoch(model, loader, optimizer):
    model.train()
    losses = []
    for enc, target in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(**to_device(enc))
            loss = F.binary_cross_entropy_with_logits(logits, target.cuda())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return float(np.mean(losses))


@torch.inference_mode()
def evaluate(model, loader) -> Dict[str, float]:
    model.eval()
    probs, targets = [], []
    for enc, target in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):  # <- here
            prob = torch.sigmoid(model(**to_device(enc)))  # <- here
        probs.append(prob.cpu().numpy())  # <- here
        targets.append(target.numpy())
    p, t = np.concatenate(probs), np.concatenate(targets)
    return {"ap": average_precision_score(t, p, average="macro"), "f1": f1_score(t, p > 0.5, average="micro")}


def main(name="microsoft/deberta-v3-base", queues=42, epochs=4):
    train_rows, valid_rows = read_tickets("tickets.parquet")
    fn = collator(name)
    train = DataLoader(train_rows, 32, shuffle=True, collate_fn=fn)
    valid = DataLoader(valid_rows, 64, collate_fn=fn)
    model = Router(name, queues).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    for epoch in range(epochs):
        print(epoch, train_epoch(model, train, optimizer), evaluate(model, valid))


if __name__ == "__main__":
    main()
