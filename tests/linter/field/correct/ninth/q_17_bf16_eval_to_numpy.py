# why correct: bfloat16 outputs are cast to float32 before they leave for numpy, metrics and running sums, and bfloat16 needs no scaler
import numpy as np
import torch
import torch.nn as nn
from sklearn.metrics import average_precision_score


def to_numpy(t):
    return t.detach().float().cpu().numpy()


class TagHead(nn.Module):
    def __init__(self, backbone, dim, tags):
        super().__init__()
        self.backbone = backbone
        self.pool = nn.Linear(dim, 1)
        self.out = nn.Linear(dim, tags)

    def forward(self, wave):
        h = self.backbone(wave)
        w = self.pool(h).softmax(dim=1)
        return self.out((w * h).sum(1))


def evaluate(model, loader, device):
    model.eval()
    scores, truth, loss_sum, count = [], [], 0.0, 0
    with torch.inference_mode(), torch.autocast(device.type, dtype=torch.bfloat16):
        for wave, tags in loader:
            logits = model(wave.to(device))
            tags = tags.to(device)
            loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), tags.float(), reduction="sum")
            loss_sum += loss.item()
            count += tags.numel()
            scores.append(to_numpy(logits))
            truth.append(to_numpy(tags))
    y, s = np.concatenate(truth), np.concatenate(scores)
    used = y.sum(0) > 0
    return loss_sum / count, average_precision_score(y[:, used], s[:, used], average="macro")


def train(backbone, dim, tags, train_loader, dev_loader, epochs=15):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = TagHead(backbone, dim, tags).to(device)
    groups = [{"params": model.backbone.parameters(), "lr": 2e-5},
              {"params": [*model.pool.parameters(), *model.out.parameters()], "lr": 1e-3}]
    opt = torch.optim.AdamW(groups, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, [2e-5, 1e-3], total_steps=epochs * len(train_loader))
    best = -1.0
    for epoch in range(epochs):
        model.train()
        running = torch.zeros((), device=device)
        for wave, y in train_loader:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                logits = model(wave.to(device))
                loss = nn.functional.binary_cross_entropy_with_logits(logits, y.to(device).float())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            running += loss.detach()
        dev_loss, score = evaluate(model, dev_loader, device)
        print(f"{epoch} train {running.item() / len(train_loader):.4f} dev {dev_loss:.4f} mAP {score:.4f}")
        if score > best:
            best = score
            torch.save(model.state_dict(), "tagger.pt")
