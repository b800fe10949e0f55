# source: kekmodel/MPL-pytorch:main.py@0255c62a93888d1497477f80f1ea8bc2a0a348de
# mistake: the weight average is updated also after steps the scaler skipped, so at the start of a run the untrained weights are counted several times.
# severity: warning
# torch: any
import argparse
import copy

import torch
import torch.nn.functional as F
from torch import nn


class ModelEMA(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update_parameters(self, model):
        for avg, cur in zip(self.module.state_dict().values(), model.state_dict().values()):
            avg.copy_(torch.lerp(avg.double(), cur.double(), 1 - self.decay))


def train_loop(args, loader, student, avg_student, optimizer, scaler):
    step = 0
    while step < args.total_steps:
        for images, targets in loader:
            images, targets = images.to(args.device), targets.to(args.device)
            with torch.amp.autocast("cuda", enabled=args.amp):
                loss = F.cross_entropy(student(images), targets, label_smoothing=0.15)

            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if args.ema > 0:
                avg_student.update_parameters(student)  # <- here
            step += 1
    return avg_student if args.ema > 0 else student


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--total-steps", type=int, default=300_000)
    p.add_argument("--ema", type=float, default=0.995)
    p.add_argument("--amp", action="store_true")
    args = p.parse_args()
    args.device = torch.device("cuda", 0)

    from cifar import labeled_loader, wide_resnet

    student = wide_resnet(28, 2).to(args.device)
    sgd = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    train_loop(args, labeled_loader(4000), student, ModelEMA(student, args.ema), sgd, scaler)


if __name__ == "__main__":
    main()
