# why correct: a loss scale kept by hand multiplies the loss, gradients are divided by it and checked for infs before clipping and stepping, and bad steps are dropped
import torch
import torch.nn as nn
import torch.nn.functional as F

STATE = {"scale": 2.0 ** 13, "good": 0, "window": 500}


def finite_after_division(params, scale):
    ok = True
    for p in params:
        if p.grad is None:
            continue
        p.grad.div_(scale)
        ok = ok and bool(torch.isfinite(p.grad).all())
    return ok


def adapt(ok):
    if not ok:
        STATE["scale"] = max(STATE["scale"] / 2, 1.0)
        STATE["good"] = 0
        return
    STATE["good"] += 1
    if STATE["good"] == STATE["window"]:
        STATE["scale"] = min(STATE["scale"] * 2, 2.0 ** 24)
        STATE["good"] = 0


net = nn.Sequential(
    nn.Conv1d(12, 64, 15, 2, 7), nn.BatchNorm1d(64), nn.ReLU(),
    nn.Conv1d(64, 128, 15, 2, 7), nn.BatchNorm1d(128), nn.ReLU(),
    nn.Conv1d(128, 256, 15, 2, 7), nn.BatchNorm1d(256), nn.ReLU(),
    nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(256, 5),
).cuda()
optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-4)


def train_on(ecg, labels):
    with torch.autocast("cuda", dtype=torch.float16):
        logits = net(ecg)
        loss = F.binary_cross_entropy_with_logits(logits, labels)
    optimizer.zero_grad()
    scale = STATE["scale"]
    (loss * scale).backward()
    ok = finite_after_division(net.parameters(), scale)
    if ok:
        nn.utils.clip_grad_norm_(net.parameters(), 2.0)
        optimizer.step()
    adapt(ok)
    return loss.item(), ok


def main(loader, epochs=40):
    for epoch in range(epochs):
        net.train()
        dropped, losses = 0, []
        for ecg, labels in loader:
            value, ok = train_on(ecg.cuda(), labels.float().cuda())
            losses.append(value)
            dropped += not ok
        print(epoch, sum(losses) / len(losses), "dropped", dropped, "scale", STATE["scale"])
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "loss_scale": STATE}, "ecg.pt")


if __name__ == "__main__":
    from ecg_data import loader

    main(loader())
