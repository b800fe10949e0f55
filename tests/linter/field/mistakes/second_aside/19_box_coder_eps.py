"""
# source: https://github.com/rwightman/efficientdet-pytorch/issues/291
# mistake: the box sizes are float16 under autocast, where the guard 1e-8 is zero; a size that underflows gives log(0) = -inf and the loss is not finite.
# severity: error
# torch: any
"""
import torch
from torch import nn
from torch.nn import functional as F

EPS = 1e-8


class BoxHead(nn.Module):
    def __init__(self, channels=64, num_anchors=9):
        super().__init__()
        self.tower = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, groups=channels),
            nn.Conv2d(channels, channels, 1),
            nn.SiLU(),
        )
        self.predict = nn.Conv2d(channels, num_anchors * 4, 3, padding=1)

    def forward(self, feats):
        return [self.predict(self.tower(f)).permute(0, 2, 3, 1).reshape(f.shape[0], -1, 4) for f in feats]


def encode(pred, anchors):
    """Offsets of the predicted boxes relative to the anchors."""
    center, size = pred.sigmoid().chunk(2, dim=-1)
    a_center, a_size = anchors.to(pred.dtype).chunk(2, dim=-1)
    offset = (center - a_center) / a_size
    scale = torch.log(size / a_size + EPS)  # <- here
    return torch.cat([offset, scale], dim=-1)


class DetBench(nn.Module):
    def __init__(self, backbone, anchors):
        super().__init__()
        self.backbone = backbone
        self.head = BoxHead()
        self.register_buffer("anchors", anchors)

    def forward(self, images, box_targets, positive):
        pred = torch.cat(self.head(self.backbone(images)), dim=1)
        codes = encode(pred, self.anchors)
        return F.smooth_l1_loss(codes[positive].float(), box_targets[positive], beta=0.1)


def train(bench, loader, epochs=50):
    bench = bench.cuda()
    optimizer = torch.optim.SGD(bench.parameters(), lr=0.08, momentum=0.9, weight_decay=4e-5)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        bench.train()
        for images, targets, positive in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = bench(images.cuda(), targets.cuda(), positive.cuda())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(bench.parameters(), 10.0)
            scaler.step(optimizer)
            scaler.update()
        print(epoch, loss.item())
