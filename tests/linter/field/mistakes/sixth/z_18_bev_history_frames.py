# source: pytorch/pytorch issue #105211 (from BEVFormer's AMP training)
# mistake: the history pass runs the same weights under no_grad inside the autocast region of the training pass; autocast caches gradient-less casts and those weights get no gradient
# severity: error
import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast


class BevEncoder(nn.Module):
    def __init__(self, c=256):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 64, 7, 4, 3), nn.ReLU(), nn.Conv2d(64, c, 3, 2, 1), nn.ReLU())
        self.lift = nn.Conv2d(c, c, 1)
        self.fuse = nn.Conv2d(2 * c, c, 3, padding=1)

    def forward(self, frame, previous=None):
        bev = self.lift(self.image(frame))
        if previous is None:
            previous = torch.zeros_like(bev)
        return self.fuse(torch.cat([bev, previous.to(bev.dtype)], 1))


class TemporalDetector(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.encoder = BevEncoder()
        self.cls, self.box = nn.Conv2d(256, classes, 1), nn.Conv2d(256, 8, 1)

    def history(self, frames):
        """Rolls over the old frames; only the newest one is trained."""
        was_training = self.training
        self.eval()
        bev = None
        with torch.no_grad():  # <- here
            for i in range(frames.shape[1]):
                bev = self.encoder(frames[:, i], bev)  # <- here
        self.train(was_training)
        return bev

    def forward(self, clip):
        bev = self.encoder(clip[:, -1], self.history(clip[:, :-1]))  # <- here
        return self.cls(bev), self.box(bev)


def detection_loss(cls, box, gt):
    heat = nn.functional.binary_cross_entropy_with_logits(cls, gt["heat"])
    reg = (nn.functional.l1_loss(box.float(), gt["box"], reduction="none") * gt["mask"]).sum() / gt["mask"].sum().clamp(min=1)
    return heat + 0.25 * reg


def train(model, loader, epochs, lr=2e-4):
    model.cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    scaler = GradScaler(init_scale=512)
    for epoch in range(epochs):
        model.train()
        for clip, gt in loader:
            clip = clip.cuda()
            gt = {k: v.cuda() for k, v in gt.items()}
            opt.zero_grad(set_to_none=True)
            with autocast():  # <- here
                loss = detection_loss(*model(clip), gt)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 35.0)
            scaler.step(opt)
            scaler.update()
        print("epoch", epoch, "loss", loss.item())
