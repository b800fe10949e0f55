# source: maxencewynen/ConfLUNet PR #16
# mistake: the scaler's state is written to the checkpoint but never read back when training continues
# severity: warning
import argparse
from pathlib import Path

import torch
from monai.losses import DiceCELoss
from monai.networks.nets import UNet
from torch.amp import GradScaler
from torch.utils.data import DataLoader

from lesions.volumes import PatchSet, collate_patches


def get_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("folder", type=Path)
    ap.add_argument("--name", default="lesion3d")
    ap.add_argument("--continue_training", action="store_true")
    ap.add_argument("--epochs", type=int, default=500)
    ap.add_argument("--lr", type=float, default=1e-2)
    return ap.parse_args()


class Run:
    def __init__(self, args):
        self.args = args
        self.dir = Path("results") / args.name
        self.dir.mkdir(parents=True, exist_ok=True)
        self.net = UNet(3, 2, 2, channels=(32, 64, 128, 256, 320), strides=(2, 2, 2, 2), num_res_units=2).cuda()
        self.opt = torch.optim.SGD(self.net.parameters(), lr=args.lr, momentum=0.99, nesterov=True)
        self.grad_scaler = GradScaler("cuda")
        self.loss = DiceCELoss(to_onehot_y=True, softmax=True)
        self.epoch = 0

    @property
    def latest(self):
        return self.dir / "checkpoint_latest.pth"

    def checkpoint(self):
        state = dict(
            net=self.net.state_dict(),
            opt=self.opt.state_dict(),
            grad_scaler=self.grad_scaler.state_dict(),
            epoch=self.epoch,
        )
        torch.save(state, self.latest)

    def restore(self):
        state = torch.load(self.latest, map_location="cuda")  # <- here
        self.net.load_state_dict(state["net"])
        self.opt.load_state_dict(state["opt"])  # <- here
        self.epoch = state["epoch"]

    def poly_lr(self):
        lr = self.args.lr * (1 - self.epoch / self.args.epochs) ** 0.9
        for g in self.opt.param_groups:
            g["lr"] = lr

    def one_epoch(self, loader):
        self.net.train()
        acc = 0.0
        for patch in loader:
            x = patch["image"].cuda(non_blocking=True)
            y = patch["label"].cuda(non_blocking=True)
            self.opt.zero_grad(set_to_none=True)
            with torch.autocast("cuda"):
                logits = self.net(x)
            l = self.loss(logits.float(), y)
            self.grad_scaler.scale(l).backward()
            self.grad_scaler.unscale_(self.opt)
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 12)
            self.grad_scaler.step(self.opt)
            self.grad_scaler.update()
            acc += l.item()
        return acc / len(loader)

    def go(self):
        if self.args.continue_training and self.latest.is_file():
            self.restore()  # <- here
        loader = DataLoader(PatchSet(self.args.folder), 2, shuffle=True, collate_fn=collate_patches, num_workers=6)
        while self.epoch < self.args.epochs:
            self.poly_lr()
            value = self.one_epoch(loader)
            self.epoch += 1
            print(f"[{self.epoch}] loss={value:.4f}")
            if self.epoch % 10 == 0:
                self.checkpoint()


if __name__ == "__main__":
    Run(get_args()).go()
