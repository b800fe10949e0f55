# source: https://github.com/Azure/MS-AMP/pull/45
# mistake: scaler.update() is never called, so the second scaler.step raises "step() has already been called since the last update()"
# severity: error
import torch
import torch.nn.functional as F
from torch import nn
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms as T

s = 1.0
jitter = T.ColorJitter(0.8 * s, 0.8 * s, 0.8 * s, 0.2 * s)
augment = T.Compose([
    T.RandomResizedCrop(96),
    T.RandomHorizontalFlip(),
    T.RandomApply([jitter], p=0.8),
    T.RandomGrayscale(p=0.2),
    T.ToTensor(),
])


class TwoViews:
    def __init__(self, tf):
        self.tf = tf

    def __call__(self, img):
        return self.tf(img), self.tf(img)


class Encoder(nn.Module):
    def __init__(self, out=128):
        super().__init__()
        self.net = models.resnet50(num_classes=out)
        hid = self.net.fc.in_features
        self.net.fc = nn.Sequential(nn.Linear(hid, hid), nn.ReLU(), nn.Linear(hid, out))

    def forward(self, x):
        return self.net(x)


def nt_xent(z1, z2, temperature=0.1):
    z = F.normalize(torch.cat([z1, z2]).float(), dim=1)
    sim = z @ z.t() / temperature
    n = len(z1)
    sim.fill_diagonal_(float("-inf"))
    pos = torch.arange(2 * n, device=z.device).roll(n)
    return F.cross_entropy(sim, pos)


def main(root="data", epochs=200, batch=512):
    data = datasets.STL10(root, split="unlabeled", transform=TwoViews(augment), download=True)
    loader = DataLoader(data, batch, shuffle=True, num_workers=16, drop_last=True, pin_memory=True)
    model = Encoder().cuda()
    opt = torch.optim.AdamW(model.parameters(), 3e-4, weight_decay=1e-4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=epochs * len(loader))
    scaler = GradScaler()  # <- here
    for epoch in range(epochs):
        running = 0.0
        for (a, b), _ in loader:
            with autocast():
                z1, z2 = model(a.cuda(non_blocking=True)), model(b.cuda(non_blocking=True))
            loss = nt_xent(z1, z2)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(opt)  # <- here
            cosine.step()  # <- here
            running += loss.item()
        print(f"{epoch}: {running / len(loader):.4f}")
        torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "scaler": scaler.state_dict(),
                    "epoch": epoch}, "simclr.pt")


if __name__ == "__main__":
    main()
