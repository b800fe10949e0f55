# source: qubvel-org/segmentation_models.pytorch issue #463 https://github.com/qubvel-org/segmentation_models.pytorch/issues/463
# mistake: the overlap of a 768x768 mask is summed in float16 outside autocast, which passes 65504 and gives inf/NaN
# severity: error
import torch
from torch import nn

SIDE = 768


def double(i, o):
    return nn.Sequential(
        nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
        nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
    )


class VesselNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.d1, self.d2, self.d3 = double(3, 32), double(32, 64), double(64, 128)
        self.pool = nn.MaxPool2d(2)
        self.u2 = nn.ConvTranspose2d(128, 64, 2, 2)
        self.c2 = double(128, 64)
        self.u1 = nn.ConvTranspose2d(64, 32, 2, 2)
        self.c1 = double(64, 32)
        self.out = nn.Conv2d(32, 1, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(self.pool(a))
        c = self.d3(self.pool(b))
        b = self.c2(torch.cat([self.u2(c), b], 1))
        a = self.c1(torch.cat([self.u1(b), a], 1))
        return torch.sigmoid(self.out(a))


def overlap_loss(prob, mask, smooth=1.0):
    p = prob.reshape(prob.size(0), SIDE * SIDE)
    m = mask.reshape(mask.size(0), SIDE * SIDE).to(p.dtype)  # <- here
    both = (p * m).sum(dim=1)  # <- here
    size = p.sum(dim=1) + m.sum(dim=1)  # <- here
    return (1 - (2 * both + smooth) / (size + smooth)).mean()  # <- here


def main(loader, epochs=80):
    net = VesselNet().cuda()
    opt = torch.optim.RMSprop(net.parameters(), lr=1e-4, momentum=0.9)
    scaler = torch.cuda.amp.GradScaler()
    for epoch in range(epochs):
        for scan, mask in loader:
            scan, mask = scan.cuda(), mask.cuda()
            opt.zero_grad()
            with torch.cuda.amp.autocast(dtype=torch.float16):
                prob = net(scan)
            loss = overlap_loss(prob, mask)  # <- here
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        print(f"epoch {epoch} dice loss {loss.item():.4f}")
    torch.save(net.state_dict(), "vessels.pt")


if __name__ == "__main__":
    from retina import crops

    main(crops("drive", side=SIDE, batch=4))
