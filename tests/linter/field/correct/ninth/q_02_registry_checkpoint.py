# why correct: the GradScaler is one of the registered stateful objects, so it is saved and restored in the loop over the registry
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F


class Registry:
    """Everything with state_dict/load_state_dict that makes up a run."""

    def __init__(self, **members):
        self.members = members
        self.epoch = 0

    def dump(self, path):
        payload = {"epoch": self.epoch}
        for name, member in self.members.items():
            payload[name] = member.state_dict()
        fd, tmp = tempfile.mkstemp(dir=os.path.dirname(path))
        os.close(fd)
        torch.save(payload, tmp)
        os.replace(tmp, path)

    def pull(self, path):
        if not os.path.exists(path):
            return False
        payload = torch.load(path, map_location="cpu", weights_only=True)
        self.epoch = payload.pop("epoch")
        for name, state in payload.items():
            self.members[name].load_state_dict(state)
        return True


class KeywordNet(nn.Module):
    def __init__(self, mels=40, classes=35):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(mels, 128, 9, padding=4), nn.BatchNorm1d(128), nn.ReLU(),
            nn.Conv1d(128, 128, 9, padding=4, stride=2), nn.BatchNorm1d(128), nn.ReLU())
        self.head = nn.Linear(128, classes)

    def forward(self, x):
        return self.head(self.conv(x).mean(-1))


def train(loader, workdir, epochs=60):
    os.makedirs(workdir, exist_ok=True)
    net = KeywordNet().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    scaler = torch.amp.GradScaler("cuda")
    run = Registry(net=net, optimizer=optimizer, schedule=schedule, scaler=scaler)
    path = os.path.join(workdir, "state.pt")
    if run.pull(path):
        print("continuing at epoch", run.epoch)

    while run.epoch < epochs:
        net.train()
        for mel, label in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(net(mel.cuda()), label.cuda())
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        schedule.step()
        run.epoch += 1
        run.dump(path)
    torch.save(net.state_dict(), os.path.join(workdir, "weights_only.pt"))
