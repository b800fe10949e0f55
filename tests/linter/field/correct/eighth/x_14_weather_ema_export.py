# why correct: the average is accumulated in float32 and only a copy for export is cast to bfloat16
import contextlib
import copy
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from nowcast.model import RadarUNet
from nowcast.radar import RadarSequences


class Average:
    def __init__(self, model, decay=0.9995):
        self.decay = decay
        self.values = [p.detach().clone().to(torch.float32) for p in model.parameters()]
        self.backup = None

    @torch.no_grad()
    def update(self, model):
        torch._foreach_lerp_(self.values, [p.detach().float() for p in model.parameters()], 1 - self.decay)

    @contextlib.contextmanager
    def applied(self, model):
        self.backup = [p.detach().clone() for p in model.parameters()]
        self._load(model, self.values)
        try:
            yield model
        finally:
            self._load(model, self.backup)
            self.backup = None

    @staticmethod
    @torch.no_grad()
    def _load(model, values):
        for p, v in zip(model.parameters(), values):
            p.copy_(v)

    def state_dict(self):
        return {"decay": self.decay, "values": self.values}


def export(model, average, path):
    with average.applied(model):
        small = copy.deepcopy(model).to(torch.bfloat16)
    torch.save(small.state_dict(), path)


@torch.no_grad()
def csi(model, loader, threshold=0.5):
    hit = wrong = 0
    model.eval()
    for past, future in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            pred = model(past.cuda())
        p, t = pred.float().cpu() > threshold, future > threshold
        hit += (p & t).sum().item()
        wrong += (p ^ t).sum().item()
    model.train()
    return hit / max(hit + wrong, 1)


def main(out=Path("nowcast_runs"), epochs=50):
    out.mkdir(exist_ok=True)
    model = RadarUNet(frames_in=6, frames_out=12).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-4)
    average = Average(model)
    train = DataLoader(RadarSequences("train"), 8, shuffle=True, num_workers=8)
    valid = DataLoader(RadarSequences("valid"), 8, num_workers=4)
    for epoch in range(epochs):
        for past, future in train:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                pred = model(past.cuda())
            loss = nn.functional.huber_loss(pred.float(), future.cuda())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            average.update(model)
        with average.applied(model):
            score = csi(model, valid)
        print(f"{epoch}: csi {score:.4f}")
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "average": average.state_dict()},
            out / "state.pt",
        )
        export(model, average, out / "export.pt")


if __name__ == "__main__":
    main()
