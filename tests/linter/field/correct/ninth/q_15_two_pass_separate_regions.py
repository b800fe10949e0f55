# why correct: the gradient-free pass has its own autocast region, and the cast weights cached there are dropped when it ends
import torch
import torch.nn as nn
import torch.nn.functional as F


def half():
    return torch.autocast("cuda", dtype=torch.float16)


class BirdView(nn.Module):
    def __init__(self, cams=6, dim=128, classes=10):
        super().__init__()
        self.lift = nn.Conv2d(3 * cams, dim, 7, 4, 3)
        self.fuse = nn.Conv2d(2 * dim, dim, 3, padding=1)
        self.refine = nn.Sequential(nn.Conv2d(dim, dim, 3, padding=1), nn.GroupNorm(8, dim), nn.GELU(),
                                    nn.Conv2d(dim, dim, 3, padding=1))
        self.heat = nn.Conv2d(dim, classes, 1)

    def memory(self, images, previous):
        x = self.lift(images)
        if previous is None:
            previous = torch.zeros_like(x)
        x = self.fuse(torch.cat([x, previous.to(x.dtype)], dim=1))
        return x + self.refine(x)

    def forward(self, images, previous):
        return self.heat(self.memory(images, previous))


def history(model, frames):
    state = None
    was_training = model.training
    model.eval()
    with torch.no_grad(), half():
        for images in frames.unbind(1):
            state = model.memory(images, state)
    model.train(was_training)
    return None if state is None else state.float()


def focal(logits, target):
    logits = logits.float()
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    p = logits.sigmoid()
    w = target * (1 - p) + (1 - target) * p
    return (w.pow(2) * ce).sum() / target.sum().clamp(min=1)


def train(model, loader, epochs):
    model.cuda().train()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for clip, target in loader:
            clip, target = clip.cuda(), target.cuda()
            past = history(model, clip[:, :-1])
            with half():
                logits = model(clip[:, -1], past)
            loss = focal(logits, target)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 35.0)
            scaler.step(opt)
            scaler.update()
        print(epoch, loss.item())
