# why correct: the scaler is one of the stateful objects in the registry, so it is saved and restored with everything else although no line names scaler.state_dict
import pathlib

import torch
from torch import nn


class Bag:
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.things = {}
        self.counters = {"step": 0}

    def register(self, **things):
        self.things.update(things)
        return self

    def dump(self):
        blob = {k: v.state_dict() for k, v in self.things.items()}
        blob["counters"] = dict(self.counters)
        tmp = self.folder / "tmp.pt"
        torch.save(blob, tmp)
        tmp.rename(self.folder / f"step{self.counters['step']:08d}.pt")

    def resume(self):
        files = sorted(self.folder.glob("step*.pt"))
        if not files:
            return False
        blob = torch.load(files[-1], map_location="cpu")
        self.counters = blob.pop("counters")
        for k, v in blob.items():
            self.things[k].load_state_dict(v)
        return True


class FlowNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(6, 64, 7, 2, 3), nn.ReLU(), nn.Conv2d(64, 128, 5, 2, 2), nn.ReLU())
        self.g = nn.Sequential(nn.Upsample(scale_factor=4, mode="bilinear"), nn.Conv2d(128, 2, 3, padding=1))

    def forward(self, a, b):
        return self.g(self.f(torch.cat([a, b], 1)))


def main(stream, total=300_000):
    net = FlowNet().cuda()
    opt = torch.optim.AdamW(net.parameters(), 4e-4, weight_decay=1e-5)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, total)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0 ** 12)
    bag = Bag("runs/flow").register(net=net, opt=opt, sched=sched, scaler=scaler)
    if bag.resume():
        print("continuing at", bag.counters["step"])
    for a, b, flow, valid in stream:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(a.cuda(), b.cuda())
        err = (out.float() - flow.cuda()).norm(dim=1)
        loss = err[valid.cuda()].mean()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        sched.step()
        bag.counters["step"] += 1
        if bag.counters["step"] % 1000 == 0:
            bag.dump()
        if bag.counters["step"] >= total:
            break


if __name__ == "__main__":
    from chairs import stream

    main(stream())
