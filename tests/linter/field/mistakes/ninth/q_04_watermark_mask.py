# source: https://github.com/bcmi/SLBR-Visible-Watermark-Removal/issues/10
# mistake: nn.BCELoss is applied to sigmoid outputs inside an autocast region, which raises because it is unsafe to autocast
# severity: error
import torch
import torch.nn as nn
import torch.nn.functional as F


def block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.SiLU(inplace=True))


class LogoRemover(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.down1, self.down2 = block(3, width), block(width, width * 2)
        self.up = block(width * 3, width)
        self.rgb = nn.Conv2d(width, 3, 1)
        self.alpha = nn.Sequential(nn.Conv2d(width, 1, 1), nn.Sigmoid())  # <- here

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        b = F.interpolate(b, scale_factor=2, mode="bilinear", align_corners=False)
        h = self.up(torch.cat([a, b], 1))
        return self.rgb(h), self.alpha(h)


class Restorer:
    def __init__(self, opts):
        self.opts = opts
        self.net = LogoRemover(opts["width"]).cuda()
        self.optim = torch.optim.Adam(self.net.parameters(), lr=opts["lr"], betas=(0.5, 0.999))
        self.scaler = torch.cuda.amp.GradScaler(enabled=opts["amp"])
        self.pixel_loss = nn.L1Loss()
        self.mask_loss = nn.BCELoss()  # <- here

    def losses(self, batch):
        clean, mask = self.net(batch["image"])
        blended = mask * clean + (1 - mask) * batch["image"]
        return {
            "pixel": self.pixel_loss(blended, batch["target"]),
            "mask": self.mask_loss(mask, batch["mask"]),  # <- here
        }

    def step(self, batch):
        batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
        self.optim.zero_grad(set_to_none=True)
        with torch.cuda.amp.autocast(enabled=self.opts["amp"]):  # <- here
            parts = self.losses(batch)  # <- here
            loss = parts["pixel"] + self.opts["mask_weight"] * parts["mask"]
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optim)
        self.scaler.update()
        return {k: v.detach() for k, v in parts.items()}


OPTS = {"width": 48, "lr": 2e-4, "amp": True, "mask_weight": 2.0}


def train(loader, epochs=100):
    trainer = Restorer(OPTS)
    for epoch in range(epochs):
        trainer.net.train()
        for i, batch in enumerate(loader):
            parts = trainer.step(batch)
            if i % 200 == 0:
                print(epoch, i, {k: round(v.item(), 4) for k, v in parts.items()})
    return trainer.net
