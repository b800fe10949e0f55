# why correct: two losses and two optimizers share one scaler; both are scaled with the same factor, each optimizer is unscaled once and update() comes once, at the end.
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from reco.data import Sessions
from reco.model import ItemTower, SessionTower


class JointTrainer:
    def __init__(self, items, dim=128, device="cuda:0", fp16=True):
        self.device = device
        self.fp16 = fp16
        self.session = SessionTower(items, dim).to(device)
        self.item = ItemTower(items, dim).to(device)
        sparse = [self.item.table.weight]
        dense = [p for n, p in self.item.named_parameters() if n != "table.weight"] + list(self.session.parameters())
        self.optimizers = [torch.optim.Adagrad(sparse, lr=0.05), torch.optim.AdamW(dense, lr=5e-4)]
        self.dense = dense
        self.scaler = torch.amp.GradScaler("cuda", enabled=fp16)

    def forward(self, batch):
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.fp16):
            query = self.session(batch["history"], batch["length"])
            target = self.item(batch["next"])
        query = F.normalize(query.float(), dim=-1)
        target = F.normalize(target.float(), dim=-1)
        logits = query @ target.t() / 0.07
        label = torch.arange(len(logits), device=logits.device)
        contrast = F.cross_entropy(logits, label)
        popularity = F.mse_loss(self.item.popularity(target).squeeze(-1), batch["log_count"])
        return contrast, popularity

    def step(self, batch):
        batch = {k: v.to(self.device, non_blocking=True) for k, v in batch.items()}
        for o in self.optimizers:
            o.zero_grad(set_to_none=True)
        contrast, popularity = self.forward(batch)
        self.scaler.scale(contrast).backward(retain_graph=True)
        self.scaler.scale(0.1 * popularity).backward()
        self.scaler.unscale_(self.optimizers[1])
        norm = nn.utils.clip_grad_norm_(self.dense, 1.0)
        for o in self.optimizers:
            self.scaler.step(o)
        self.scaler.update()
        return contrast.item(), popularity.item(), norm.item()

    def save(self, path):
        torch.save(
            {
                "towers": [self.session.state_dict(), self.item.state_dict()],
                "optimizers": [o.state_dict() for o in self.optimizers],
                "scaler": self.scaler.state_dict(),
            },
            path,
        )

    def load(self, path):
        blob = torch.load(path, map_location=self.device)
        for tower, state in zip((self.session, self.item), blob["towers"]):
            tower.load_state_dict(state)
        for o, state in zip(self.optimizers, blob["optimizers"]):
            o.load_state_dict(state)
        self.scaler.load_state_dict(blob["scaler"])


def main(folder="yoochoose", epochs=10):
    data = Sessions(Path(folder))
    loader = DataLoader(data, 2048, shuffle=True, collate_fn=data.collate, num_workers=4, drop_last=True)
    trainer = JointTrainer(items=data.n_items)
    latest = Path("joint.pt")
    if latest.exists():
        trainer.load(latest)
    for epoch in range(epochs):
        for i, batch in enumerate(loader):
            c, p, n = trainer.step(batch)
            if i % 100 == 0:
                print(f"{epoch}/{i} contrast {c:.3f} popularity {p:.3f} norm {n:.2f}")
        trainer.save(latest)


if __name__ == "__main__":
    main()
