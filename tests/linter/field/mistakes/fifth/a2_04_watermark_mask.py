# source: https://github.com/bcmi/SLBR-Visible-Watermark-Removal/issues/10
# mistake: nn.BCELoss is applied to sigmoid outputs inside a float16 autocast region, where binary_cross_entropy refuses to run (RuntimeError: unsafe to autocast)
# severity: error
import torch
from torch import nn
from torch.amp import GradScaler, autocast


def block(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1, bias=False),
        nn.BatchNorm2d(cout),
        nn.LeakyReLU(0.1, inplace=True),
    )


class StampEraser(nn.Module):
    """Predicts the clean picture and the place of the stamp."""

    def __init__(self, width=48):
        super().__init__()
        self.enc1 = block(3, width)
        self.enc2 = block(width, width * 2)
        self.pool = nn.MaxPool2d(2)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.dec = block(width * 3, width)
        self.to_rgb = nn.Conv2d(width, 3, 1)
        self.to_mask = nn.Sequential(nn.Conv2d(width, 1, 1), nn.Sigmoid())  # <- here

    def forward(self, x):
        a = self.enc1(x)
        b = self.enc2(self.pool(a))
        f = self.dec(torch.cat([a, self.up(b)], dim=1))
        return self.to_rgb(f), self.to_mask(f)


class Trainer:
    def __init__(self, lr=2e-4, mask_weight=1.0):
        self.net = StampEraser().cuda()
        self.opt = torch.optim.Adam(self.net.parameters(), lr=lr, betas=(0.9, 0.99))
        self.scaler = GradScaler("cuda")
        self.l1 = nn.L1Loss()
        self.mask_loss = nn.BCELoss()  # <- here
        self.mask_weight = mask_weight

    def losses(self, pred, mask_pred, clean, mask):
        rgb = self.l1(pred * mask_pred, clean * mask_pred) + 0.1 * self.l1(pred, clean)
        loc = self.mask_loss(mask_pred, mask)  # <- here
        return rgb, loc

    def step(self, stamped, clean, mask):
        self.opt.zero_grad(set_to_none=True)
        with autocast("cuda", dtype=torch.float16):  # <- here
            pred, mask_pred = self.net(stamped)
            rgb, loc = self.losses(pred, mask_pred, clean, mask)
            total = rgb + self.mask_weight * loc
        self.scaler.scale(total).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        return {"rgb": rgb.item(), "mask": loc.item()}


def train(loader, epochs=30):
    t = Trainer()
    for e in range(epochs):
        for stamped, clean, mask in loader:
            logs = t.step(stamped.cuda(), clean.cuda(), mask.cuda().float())
        print(e, logs)
    torch.save(t.net.state_dict(), "eraser.pt")
