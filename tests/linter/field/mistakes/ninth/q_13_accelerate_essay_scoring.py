# source: https://github.com/huggingface/accelerate/issues/641
# mistake: accelerator.clip_grad_norm_ runs on every micro-batch of an accumulation window with fp16, so the gradients are unscaled twice and the scaler raises
# severity: error
import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup


class EssayTrainer:
    def __init__(self, backbone, train_ds, dev_ds, accum=8, max_norm=1.0, lr=2e-5, epochs=4):
        self.acc = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=accum)
        self.tok = AutoTokenizer.from_pretrained(backbone)
        model = AutoModelForSequenceClassification.from_pretrained(backbone, num_labels=1, problem_type="regression")
        optim = torch.optim.AdamW(self._groups(model), lr=lr)
        train = DataLoader(train_ds, batch_size=2, shuffle=True, collate_fn=self.collate)
        dev = DataLoader(dev_ds, batch_size=8, collate_fn=self.collate)
        updates = epochs * len(train) // accum
        sched = get_linear_schedule_with_warmup(optim, int(0.1 * updates), updates)
        self.model, self.optim, self.train, self.dev, self.sched = self.acc.prepare(model, optim, train, dev, sched)
        self.max_norm, self.epochs = max_norm, epochs

    @staticmethod
    def _groups(model):
        plain = ("bias", "LayerNorm.weight")
        return [
            {"params": [p for n, p in model.named_parameters() if not n.endswith(plain)], "weight_decay": 0.01},
            {"params": [p for n, p in model.named_parameters() if n.endswith(plain)], "weight_decay": 0.0},
        ]

    def collate(self, rows):
        enc = self.tok([r["text"] for r in rows], truncation=True, max_length=1024, padding=True, return_tensors="pt")
        enc["labels"] = torch.tensor([r["score"] for r in rows], dtype=torch.float32)
        return enc

    def epoch(self):
        self.model.train()
        seen, total = 0, 0.0
        for batch in self.train:
            with self.acc.accumulate(self.model):
                loss = self.model(**batch).loss
                self.acc.backward(loss)
                self.acc.clip_grad_norm_(self.model.parameters(), self.max_norm)  # <- here
                self.optim.step()
                self.sched.step()
                self.optim.zero_grad()
            total += loss.item()
            seen += 1
        return total / seen

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        preds, gold = [], []
        for batch in self.dev:
            out = self.model(**batch).logits.squeeze(-1).float()
            p, g = self.acc.gather_for_metrics((out, batch["labels"]))
            preds.append(p.cpu().numpy())
            gold.append(g.cpu().numpy())
        return float(np.sqrt(np.mean((np.concatenate(preds) - np.concatenate(gold)) ** 2)))

    def run(self):
        for e in range(self.epochs):
            loss = self.epoch()
            self.acc.print(f"{e}: train {loss:.4f} rmse {self.evaluate():.4f}")
        self.acc.wait_for_everyone()
        self.acc.unwrap_model(self.model).save_pretrained("essay", save_function=self.acc.save)
