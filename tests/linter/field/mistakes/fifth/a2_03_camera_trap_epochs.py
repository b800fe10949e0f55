# source: https://github.com/conservationtechlab/animl-py/issues/298
# mistake: a new GradScaler is built at the start of every epoch, so the adapted loss scale and growth count are lost each time
# severity: warning
"""Species classifier for camera traps (one crop per detection)."""
import yaml
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models import efficientnet_v2_m


def epoch_train(model, loader, optimizer, loss_fn, device, use_amp):
    model.train()
    total, right, seen = 0.0, 0, 0
    amp_scaler = torch.cuda.amp.GradScaler(enabled=use_amp)  # <- here
    for crops, species in loader:
        crops, species = crops.to(device), species.to(device)
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.amp.autocast(enabled=use_amp):
            scores = model(crops)
            loss = loss_fn(scores, species)
        amp_scaler.scale(loss).backward()
        amp_scaler.step(optimizer)
        amp_scaler.update()
        total += loss.item() * len(species)
        right += (scores.argmax(1) == species).sum().item()
        seen += len(species)
    return total / seen, right / seen


@torch.no_grad()
def epoch_test(model, loader, device):
    model.eval()
    right = seen = 0
    for crops, species in loader:
        scores = model(crops.to(device))
        right += (scores.argmax(1).cpu() == species).sum().item()
        seen += len(species)
    return right / max(seen, 1)


def train(cfg_file, train_set, test_set):
    cfg = yaml.safe_load(open(cfg_file))
    device = torch.device(cfg.get("device", "cuda:0"))
    model = efficientnet_v2_m(num_classes=cfg["classes"]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg["lr"], weight_decay=cfg["wd"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg["epochs"])
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    tr = DataLoader(train_set, cfg["batch"], shuffle=True, num_workers=8, drop_last=True)
    te = DataLoader(test_set, cfg["batch"], num_workers=8)

    best = 0.0
    for epoch in range(cfg["epochs"]):
        loss, acc = epoch_train(model, tr, optimizer, loss_fn, device, cfg["amp"])  # <- here
        val = epoch_test(model, te, device)
        schedule.step()
        print(f"[{epoch:03d}] loss={loss:.4f} acc={acc:.3f} val={val:.3f}")
        if val > best:
            best = val
            torch.save(model.state_dict(), cfg["out"])
