# source: engichang1467/Open-Rig3R issue #35 https://github.com/engichang1467/Open-Rig3R/issues/35
# mistake: the forward runs in CUDA autocast's default float16 but the loss is never scaled, so small gradients flush to zero
# severity: warning
import logging

import torch
import torch.nn as nn
import torch.nn.functional as F

log = logging.getLogger("rig")


class RigNet(nn.Module):
    def __init__(self, d=256):
        super().__init__()
        self.back = nn.Sequential(
            nn.Conv2d(3, 64, 7, 4, 3), nn.ReLU(), nn.Conv2d(64, d, 3, 2, 1), nn.ReLU(), nn.Conv2d(d, d, 3, 2, 1)
        )
        self.points = nn.Conv2d(d, 3, 1)
        self.rays = nn.Conv2d(d, 3, 1)

    def forward(self, img):
        f = self.back(img)
        return {"points": self.points(f), "rays": self.rays(f)}


class MultiLoss(nn.Module):
    def __init__(self, ray_weight=0.2):
        super().__init__()
        self.w = ray_weight

    def forward(self, out, gt):
        geo = F.mse_loss(out["points"], gt["points"])
        ang = 1 - F.cosine_similarity(out["rays"].float(), gt["rays"], dim=1).mean()
        return geo + self.w * ang, {"geo": geo.item(), "ang": ang.item()}


class Session:
    def __init__(self, net, loss, train, val, lr=1e-4):
        self.device = torch.device("cuda")
        self.net, self.loss = net.to(self.device), loss
        self.train_set, self.val_set = train, val
        self.opt = torch.optim.AdamW(net.parameters(), lr=lr)

    def move(self, batch):
        img, gt = batch
        return img.to(self.device), {k: v.to(self.device) for k, v in gt.items()}

    def epoch(self):
        self.net.train()
        for batch in self.train_set:
            img, gt = self.move(batch)
            self.opt.zero_grad()
            with torch.amp.autocast(device_type=self.device.type):  # <- here
                value, parts = self.loss(self.net(img), gt)
            value.backward()  # <- here
            self.opt.step()  # <- here
        log.info("train %s", parts)

    @torch.no_grad()
    def validate(self):
        self.net.eval()
        totals = 0.0
        for batch in self.val_set:
            img, gt = self.move(batch)
            with torch.amp.autocast(device_type=self.device.type):
                value, _ = self.loss(self.net(img), gt)
            totals += value.item()
        return totals / len(self.val_set)


if __name__ == "__main__":
    from rigs import loaders

    logging.basicConfig(level=logging.INFO)
    tr, va = loaders("nuscenes")
    s = Session(RigNet(), MultiLoss(), tr, va)
    for e in range(40):
        s.epoch()
        log.info("epoch %d val %.4f", e, s.validate())
