# source: bcmi/SLBR-Visible-Watermark-Removal issue #10
# mistake: the mask branch ends in a sigmoid and its nn.BCELoss is evaluated inside autocast, which raises "unsafe to autocast"
# severity: error
import torch
import torch.nn as nn
from torch.utils.tensorboard import SummaryWriter


class Block(nn.Sequential):
    def __init__(self, i, o):
        super().__init__(nn.Conv2d(i, o, 3, 1, 1), nn.GroupNorm(8, o), nn.SiLU())


class Remover(nn.Module):
    """Predicts the clean image and the alpha mask of the overlay."""

    def __init__(self, width=64):
        super().__init__()
        self.trunk = nn.Sequential(Block(3, width), Block(width, width), Block(width, width))
        self.image_head = nn.Conv2d(width, 3, 1)
        self.mask_head = nn.Sequential(Block(width, width), nn.Conv2d(width, 1, 1), nn.Sigmoid())  # <- here

    def forward(self, x):
        h = self.trunk(x)
        return x + self.image_head(h), self.mask_head(h)


class Objective(nn.Module):
    def __init__(self, w_img=1.5, w_mask=1.0):
        super().__init__()
        self.pixel = nn.L1Loss()
        self.mask = nn.BCELoss()  # <- here
        self.w_img, self.w_mask = w_img, w_mask

    def forward(self, out, clean, mask):
        img, m = out
        parts = {"img": self.w_img * self.pixel(img, clean), "mask": self.w_mask * self.mask(m, mask)}  # <- here
        return sum(parts.values()), parts


class Learner:
    def __init__(self, args):
        self.args = args
        self.model = Remover().to("cuda")
        self.objective = Objective()
        self.opt = torch.optim.Adam(self.model.parameters(), args.lr, betas=(0.9, 0.999))
        self.grad_scaler = torch.cuda.amp.GradScaler()
        self.board = SummaryWriter(args.logdir)
        self.it = 0

    def step(self, batch):
        wm, clean, mask = (batch[k].to("cuda", non_blocking=True) for k in ("watermarked", "clean", "mask"))
        self.opt.zero_grad(set_to_none=True)
        with torch.cuda.amp.autocast():  # <- here
            out = self.model(wm)
            loss, parts = self.objective(out, clean, mask)  # <- here
        self.grad_scaler.scale(loss).backward()
        self.grad_scaler.step(self.opt)
        self.grad_scaler.update()
        self.it += 1
        if self.it % 100 == 0:
            for name, value in parts.items():
                self.board.add_scalar(f"loss/{name}", value.item(), self.it)

    def fit(self, loader):
        for _ in range(self.args.epochs):
            for batch in loader:
                self.step(batch)
        torch.save(self.model.state_dict(), self.args.out)


if __name__ == "__main__":
    from argparse import ArgumentParser

    from clwd import make_loader

    ap = ArgumentParser()
    ap.add_argument("root")
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--epochs", type=int, default=100)
    ap.add_argument("--logdir", default="tb")
    ap.add_argument("--out", default="remover.pt")
    a = ap.parse_args()
    Learner(a).fit(make_loader(a.root))
