# source: https://github.com/bcmi/SLBR-Visible-Watermark-Removal/issues/10
# mistake: nn.BCELoss is computed on sigmoid outputs inside the autocast region, which raises RuntimeError on CUDA.
# severity: error
# torch: any (CUDA)
import torch
import torch.nn as nn


class MaskNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()
        )
        self.image_head = nn.Conv2d(width, 3, 1)
        self.mask_head = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        h = self.body(x)
        return torch.tanh(self.image_head(h)), torch.sigmoid(self.mask_head(h))


class WatermarkRemover:
    def __init__(self, args, loader):
        self.args = args
        self.loader = loader
        self.model = MaskNet().cuda()
        self.l1_loss, self.mask_loss = nn.L1Loss(), nn.BCELoss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.scaler = torch.amp.GradScaler("cuda")

    def loss(self, pred_img, pred_mask, target, mask):
        return self.l1_loss(pred_img, target) + self.args.lambda_mask * self.mask_loss(pred_mask, mask)  # <- here

    def train(self, epoch):
        self.model.train()
        for i, batch in enumerate(self.loader):
            image, target, mask = (batch[k].cuda() for k in ("image", "target", "mask"))
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                pred_img, pred_mask = self.model(image)
                total = self.loss(pred_img, pred_mask, target, mask)
            self.scaler.scale(total).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if i % 100 == 0:
                print(f"{epoch}/{i}: {total.item():.4f}")
