# why correct: only a deep copy of the network is turned into float16 (for export and a float16 smoke test with float16 input); the trained one stays float32
import copy
import pathlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.cuda.amp import GradScaler, autocast


class KeywordNet(nn.Module):
    def __init__(self, words=35, c=96):
        super().__init__()
        def block(i, o, s):
            return nn.Sequential(nn.Conv1d(i, i, 9, s, 4, groups=i, bias=False), nn.Conv1d(i, o, 1, bias=False),
                                 nn.BatchNorm1d(o), nn.ReLU(inplace=True))
        self.net = nn.Sequential(nn.BatchNorm1d(40), block(40, c, 1), block(c, c, 2), block(c, c, 1),
                                 block(c, 2 * c, 2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(2 * c, words))

    def forward(self, x):
        return self.net(x)


@torch.no_grad()
def half_agreement(net, batch):
    """How often do the float16 copy and the original agree?"""
    twin = copy.deepcopy(net).eval().half()
    was = net.training
    net.eval()
    a = net(batch).argmax(-1)
    b = twin(batch.half()).argmax(-1)
    net.train(was)
    return twin, (a == b).float().mean().item()


class Keeper:
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def resume_file(self):
        return self.folder / "resume.pt"

    def write(self, epoch, **parts):
        torch.save({"epoch": epoch, **{k: v.state_dict() for k, v in parts.items()}}, self.resume_file())

    def read(self, **parts):
        if not self.resume_file().exists():
            return 0
        blob = torch.load(self.resume_file(), map_location="cuda")
        for k, v in parts.items():
            v.load_state_dict(blob[k])
        return blob["epoch"] + 1

    def device_file(self, twin):
        torch.save(twin.state_dict(), self.folder / "device_fp16.pt")


def fit(train_dl, probe, epochs=60, folder="runs/kws"):
    net = KeywordNet().cuda()
    opt = torch.optim.SGD(net.parameters(), 0.2, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs)
    scaler = GradScaler()
    keeper = Keeper(folder)
    parts = dict(net=net, opt=opt, sched=sched, scaler=scaler)
    for epoch in range(keeper.read(**parts), epochs):
        net.train()
        for feat, word in train_dl:
            with autocast():
                loss = F.cross_entropy(net(feat.cuda(non_blocking=True)), word.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        sched.step()
        keeper.write(epoch, **parts)
        twin, same = half_agreement(net, probe.cuda())
        print(f"{epoch}: loss {loss.item():.3f}, float16 copy agrees in {same:.1%}")
        if same > 0.995:
            keeper.device_file(twin)
