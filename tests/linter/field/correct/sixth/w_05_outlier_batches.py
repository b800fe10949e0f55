# why correct: an outlier batch leaves out scaler.step but not scaler.update, which unscale_ has given its inf check, so the next unscale_ is allowed
import math
from collections import deque

import torch
from torch import nn


def median(values):
    s = sorted(values)
    return s[len(s) // 2]


def make_filter(k=8.0, memory=100):
    past = deque(maxlen=memory)

    def accept(norm):
        if not math.isfinite(norm):
            return True  # the scaler deals with overflow itself
        ok = len(past) < 10 or norm <= k * median(past)
        if ok:
            past.append(norm)
        return ok

    return accept


def train(model, loader, *, steps, lr=1e-3, clip=1.0, device="cuda"):
    model = model.to(device)
    opt = torch.optim.RAdam(model.parameters(), lr=lr)
    scaler = torch.cuda.amp.GradScaler()
    accept = make_filter()
    dropped = done = 0
    while done + dropped < steps:
        for waveform, parasitic in loader:
            waveform, parasitic = waveform.to(device), parasitic.to(device)
            with torch.cuda.amp.autocast():
                pred = model(waveform)
            loss = nn.functional.l1_loss(pred.float(), parasitic)

            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip))
            if accept(norm):
                scaler.step(opt)
                done += 1
            else:
                dropped += 1
            scaler.update()
            opt.zero_grad(set_to_none=True)

            if (done + dropped) % 500 == 0:
                print(f"{done} steps, {dropped} dropped, loss {loss.item():.4f}, norm {norm:.2f}")
            if done + dropped >= steps:
                break
    return model, opt, scaler


def save(path, model, opt, scaler):
    torch.save([model.state_dict(), opt.state_dict(), scaler.state_dict()], path)


def load(path, model, opt, scaler):
    for part, state in zip((model, opt, scaler), torch.load(path, map_location="cpu")):
        part.load_state_dict(state)
