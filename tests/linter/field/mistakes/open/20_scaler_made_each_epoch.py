# source: https://github.com/conservationtechlab/animl-py/issues/298
# mistake: the helper that runs one epoch builds its own GradScaler, so the scale is thrown away and searched for again in every epoch.
# severity: warning
# torch: any
import torch
from torch import nn, optim
from tqdm import trange


def _train_classifier_helper(loader, model, optimizer, device="cuda", mixed_precision=False):
    model.to(device)
    model.train()
    criterion = nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler(device, enabled=mixed_precision)  # <- here

    loss_total, hits, seen = 0.0, 0, 0
    bar = trange(len(loader))
    for data, labels, _ in loader:
        data, labels = data.to(device), labels.to(device)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16, enabled=mixed_precision):
            prediction = model(data)
            loss = criterion(prediction, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

        loss_total += loss.item()
        hits += (prediction.argmax(1) == labels).sum().item()
        seen += labels.numel()
        bar.set_description(f"train loss {loss_total / (bar.n + 1):.3f} acc {100 * hits / seen:.1f}%")
        bar.update(1)
    bar.close()
    return loss_total / len(loader), hits / seen


def train_classifier(model, loader, cfg):
    optimizer = optim.AdamW(model.parameters(), lr=cfg["learning_rate"], weight_decay=cfg["weight_decay"])
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=cfg["num_epochs"])
    best = 0.0
    for epoch in range(cfg["num_epochs"]):
        _, acc = _train_classifier_helper(loader, model, optimizer, mixed_precision=cfg.get("mixed_precision", True))
        scheduler.step()
        best = max(best, acc)
        print(f"[{epoch}] accuracy {acc:.3f} best {best:.3f}")
    return model
