# source: https://github.com/pytorch/pytorch/pull/36601
# mistake: update() runs for every micro batch while step() runs only at the accumulation boundary; update() without a step raises, and if it did not the scale could change among summed gradients.
# severity: error
# torch: any (2.13: AssertionError "No inf checks were recorded prior to update")
import torch
from torch.amp import GradScaler, autocast
from tqdm import tqdm


def do_train(cfg, model, loader, criterion, optimizer, scaler):
    model.train()
    losses = []
    optimizer.zero_grad()
    bar = tqdm(enumerate(loader), total=len(loader))
    for i, (ids, mask, y) in bar:
        with autocast("cuda", dtype=torch.float16):
            pred = model(ids.to(cfg.device), mask.to(cfg.device))
            loss = criterion(pred.view(-1), y.to(cfg.device).view(-1))
        losses.append(loss.item())
        scaler.scale(loss / cfg.n_accumulate).backward()
        if (i + 1) % cfg.n_accumulate == 0:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()  # <- here
        bar.set_postfix(loss=sum(losses[-50:]) / len(losses[-50:]))
    return sum(losses) / len(losses)


class CFG:
    device = "cuda"
    n_accumulate = 4
    epochs = 3
    lr = 1e-5
    backbone = "microsoft/deberta-v3-base"


if __name__ == "__main__":
    from essay_data import get_loader
    from essay_model import PooledRegressor

    model = PooledRegressor(CFG.backbone).to(CFG.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=CFG.lr, weight_decay=0.01)
    scaler = GradScaler("cuda")
    for fold_epoch in range(CFG.epochs):
        print(do_train(CFG, model, get_loader(fold=0), torch.nn.SmoothL1Loss(), optimizer, scaler))
