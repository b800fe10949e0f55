"""
# source: https://github.com/mk-minchul/AdaFace/issues/127
# mistake: the PReLU weights are created in float16, so their gradients are float16 and scaler.step raises ValueError ("Attempting to unscale FP16 gradients").
# severity: error
# torch: any
"""
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.shortcut = nn.Identity() if cin == cout and stride == 1 else nn.Conv2d(cin, cout, 1, stride, bias=False)
        self.conv1 = nn.Conv2d(cin, cout, 3, 1, 1, bias=False)
        self.act = nn.PReLU(cout, dtype=torch.float16)  # <- here
        self.conv2 = nn.Conv2d(cout, cout, 3, stride, 1, bias=False)
        self.bn = nn.BatchNorm2d(cout)

    def forward(self, x):
        return self.bn(self.conv2(self.act(self.conv1(x)))) + self.shortcut(x)


class FaceNet(nn.Module):
    def __init__(self, dim=512):
        super().__init__()
        widths = [64, 128, 256, 512]
        self.stem = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        self.body = nn.Sequential(*(Block(a, b, 2) for a, b in zip([64] + widths, widths)))
        self.fc = nn.Linear(512 * 7 * 7, dim)

    def forward(self, x):
        feat = self.fc(self.body(self.stem(x)).flatten(1))
        norm = feat.float().norm(dim=1, keepdim=True)
        return feat.float() / norm, norm


class MarginHead(nn.Module):
    def __init__(self, classes, dim=512, m=0.4, s=64.0):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(dim, classes).uniform_(-1, 1))
        self.m, self.s = m, s

    def forward(self, emb, norm, label):
        cosine = (emb @ F.normalize(self.kernel, dim=0)).float().clamp(-0.999, 0.999)
        margin = F.one_hot(label, cosine.size(1)) * self.m * (norm / 20).clamp(0.5, 1.5)
        return (cosine - margin) * self.s


def main(loader, classes, epochs=26):
    net, head = FaceNet().cuda(), MarginHead(classes).cuda()
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1, momentum=0.9, weight_decay=5e-4)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for image, label in loader:
            image, label = image.cuda(), label.cuda()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(head(*net(image), label), label)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        print(epoch, loss.item())
