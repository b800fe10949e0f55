# source: https://github.com/huggingface/accelerate/pull/134
# mistake: the loss is computed after autocast has ended, on float16 outputs, so softmax, logarithm and the sums run in float16 instead of float32.
# severity: warning
# torch: any
import torch
import torch.nn as nn
import torch.nn.functional as F


def dice_loss(logits, target, n_classes):
    prob = logits.softmax(dim=1)
    onehot = F.one_hot(target, n_classes).movedim(-1, 1).to(prob.dtype)
    inter = (prob * onehot).sum(dim=(2, 3))
    total = prob.sum(dim=(2, 3)) + onehot.sum(dim=(2, 3))
    return 1 - ((2 * inter + 1) / (total + 1)).mean()


class Segmenter:
    def __init__(self, net: nn.Module, n_classes: int, lr: float = 3e-4):
        self.net = net.cuda()
        self.n_classes = n_classes
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cuda")

    def criterion(self, logits, target):
        return F.cross_entropy(logits, target) + dice_loss(logits, target, self.n_classes)

    def train_batch(self, image, target):
        self.net.train()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            logits = self.net(image)
        loss = self.criterion(logits, target)  # <- here
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()

    @torch.inference_mode()
    def accuracy(self, loader):
        self.net.eval()
        good, total = 0, 0
        for image, target in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                logits = self.net(image.cuda())
            good += (logits.argmax(1).cpu() == target).sum().item()
            total += target.numel()
        return good / total


def fit(seg, train_loader, val_loader, epochs):
    for epoch in range(epochs):
        losses = [seg.train_batch(x.cuda(), y.cuda()) for x, y in train_loader]
        print(epoch, sum(losses) / len(losses), seg.accuracy(val_loader))
