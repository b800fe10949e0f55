# why correct: everything with a state, the scaler too, sits in one registry which is written and read in a loop
import os
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader

from seaice.charts import ChartPatches
from seaice.net import ConcentrationNet


class Registry:
    """Named objects with state_dict()/load_state_dict(), stored together in one file."""

    def __init__(self, path, **members):
        self.path = path
        self.members = OrderedDict(members)
        self.counters = {"epoch": 0, "best": 0.0}

    def dump(self):
        blob = {name: obj.state_dict() for name, obj in self.members.items()}
        blob["counters"] = dict(self.counters)
        torch.save(blob, self.path + ".tmp")
        os.replace(self.path + ".tmp", self.path)

    def pull(self):
        if not os.path.isfile(self.path):
            return False
        blob = torch.load(self.path, map_location="cpu")
        self.counters.update(blob.pop("counters"))
        for name, obj in self.members.items():
            obj.load_state_dict(blob[name])
        return True


def validate(net, loader):
    net.eval()
    err = count = 0
    with torch.no_grad():
        for sar, conc in loader:
            with autocast():
                pred = net(sar.cuda())
            pred = pred.float().sigmoid()
            err += (pred - conc.cuda()).square().sum().item()
            count += conc.numel()
    return 1 - (err / count) ** 0.5


def main(folder="charts", epochs=120):
    net = ConcentrationNet().cuda()
    optimizer = torch.optim.AdamW(net.parameters(), 5e-4)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-4, epochs=epochs, steps_per_epoch=1)
    scaler = GradScaler()
    registry = Registry("seaice.pt", net=net, optimizer=optimizer, plan=plan, scaler=scaler)
    if registry.pull():
        print("going on from epoch", registry.counters["epoch"])

    train = DataLoader(ChartPatches(folder, "train"), 24, shuffle=True, num_workers=6)
    valid = DataLoader(ChartPatches(folder, "valid"), 48, num_workers=6)
    while registry.counters["epoch"] < epochs:
        net.train()
        for sar, conc in train:
            optimizer.zero_grad()
            with autocast():
                pred = net(sar.cuda(non_blocking=True))
                loss = F.binary_cross_entropy_with_logits(pred, conc.cuda(non_blocking=True))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        plan.step()
        score = validate(net, valid)
        registry.counters["epoch"] += 1
        registry.counters["best"] = max(registry.counters["best"], score)
        registry.dump()
        print(registry.counters, round(score, 4))


if __name__ == "__main__":
    main()
