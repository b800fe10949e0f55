# why correct: each optimizer has its own scaler, so each may step and update by itself, and the critic is frozen while the generator's loss is differentiated.
import os
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader

from sr.data import PairedCrops
from sr.nets import RRDB, UNetCritic, VGGFeatures

cfg = SimpleNamespace(lr_folder="DIV2K/x4", hr_folder="DIV2K/hr", batch=16, total=400000, warm=10000,
                      lr_g=1e-4, lr_d=1e-4, w_pix=1.0, w_vgg=1.0, w_adv=0.1, out="esr")


class Pair:
    """A net with its optimizer and its scaler."""

    def __init__(self, net, lr):
        self.net = net.cuda().train()
        self.opt = torch.optim.Adam(net.parameters(), lr=lr, betas=(0.9, 0.99))
        self.scaler = GradScaler()

    def apply(self, loss):
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()

    def state(self):
        return {"net": self.net.state_dict(), "opt": self.opt.state_dict(), "scaler": self.scaler.state_dict()}

    def load(self, state):
        self.net.load_state_dict(state["net"])
        self.opt.load_state_dict(state["opt"])
        self.scaler.load_state_dict(state["scaler"])


def bce(logits, value):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, value))


def generator_loss(gen, critic, vgg, low, high, step):
    with autocast():
        fake = gen.net(low)
        loss = cfg.w_pix * F.l1_loss(fake, high)
        if step > cfg.warm:
            loss = loss + cfg.w_vgg * F.l1_loss(vgg(fake), vgg(high))
            loss = loss + cfg.w_adv * bce(critic.net(fake), 1.0)
    return loss, fake.detach()


def critic_loss(critic, fake, high):
    with autocast():
        return bce(critic.net(high), 1.0) + bce(critic.net(fake), 0.0)


def forever(loader):
    while True:
        yield from loader


def main():
    os.makedirs(cfg.out, exist_ok=True)
    torch.backends.cudnn.benchmark = True
    gen, critic = Pair(RRDB(scale=4), cfg.lr_g), Pair(UNetCritic(), cfg.lr_d)
    vgg = VGGFeatures("conv5_4").cuda().eval().requires_grad_(False)
    batches = forever(DataLoader(PairedCrops(cfg.lr_folder, cfg.hr_folder, 128), cfg.batch, shuffle=True,
                                 num_workers=8, drop_last=True))
    start, path = 0, os.path.join(cfg.out, "latest.pth")
    if os.path.exists(path):
        blob = torch.load(path, map_location="cpu")
        gen.load(blob["gen"])
        critic.load(blob["critic"])
        start = blob["step"]
    for step in range(start + 1, cfg.total + 1):
        low, high = (t.cuda(non_blocking=True) for t in next(batches))
        critic.net.requires_grad_(False)
        g, fake = generator_loss(gen, critic, vgg, low, high, step)
        gen.apply(g)
        if step > cfg.warm:
            critic.net.requires_grad_(True)
            d = critic_loss(critic, fake, high)
            critic.apply(d)
        if step % 1000 == 0:
            print(step, g.item(), gen.scaler.get_scale(), critic.scaler.get_scale())
            torch.save({"gen": gen.state(), "critic": critic.state(), "step": step}, path)


if __name__ == "__main__":
    main()
