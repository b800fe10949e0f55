# source: https://github.com/NVIDIA/apex/issues/887
# mistake: torch.linalg.svd is called on the float16 output of a linear layer inside autocast, which raises "svd_cuda not implemented for 'Half'"
# severity: error
import torch
import torch.nn.functional as F
from torch import nn


class RotationHead(nn.Module):
    """Regresses nine numbers and projects them onto SO(3)."""

    def __init__(self, in_dim):
        super().__init__()
        self.fc = nn.Linear(in_dim, 9)

    def forward(self, feat):
        m = self.fc(feat).view(-1, 3, 3)  # <- here
        u, _, vh = torch.linalg.svd(m)  # <- here
        det = torch.det((u @ vh).float())
        fix = torch.diag_embed(torch.stack([torch.ones_like(det), torch.ones_like(det), det], dim=-1))
        return u @ fix.to(u.dtype) @ vh


class PoseNet(nn.Module):
    def __init__(self, backbone, dim=512):
        super().__init__()
        self.backbone = backbone
        self.rot = RotationHead(dim)
        self.trans = nn.Linear(dim, 3)

    def forward(self, img):
        feat = self.backbone(img)
        return self.rot(feat), self.trans(feat)


class PoseTask:
    def __init__(self, net, lr, steps_per_epoch, epochs):
        self.net = net.cuda()
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, lr, steps_per_epoch * epochs + 1)
        self.scaler = torch.amp.GradScaler("cuda")

    def criterion(self, rot, trans, gt_rot, gt_trans):
        return (rot.float() - gt_rot).pow(2).sum((1, 2)).mean() + F.smooth_l1_loss(trans.float(), gt_trans)

    def forward(self, batch):
        with torch.autocast("cuda", dtype=torch.float16):
            rot, trans = self.net(batch["image"].cuda())
        return self.criterion(rot, trans, batch["rot"].cuda(), batch["trans"].cuda())

    def backward(self, loss):
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.net.parameters(), 5.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()

    def epoch(self, loader):
        self.net.train()
        for batch in loader:
            loss = self.forward(batch)
            self.backward(loss)
        return loss.item()
