# source: https://github.com/davda54/sam/issues/97
# mistake: the two passes of sharpness-aware minimisation unscale the same optimizer twice with no update in between, which raises RuntimeError.
# severity: error
# torch: any
import argparse

import torch
import torch.nn.functional as F
from sam import SAM

from cifar_data import Cifar
from wide_res_net import WideResNet


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rho", default=0.05, type=float)
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--epochs", default=200, type=int)
    parser.add_argument("--max-norm", default=5.0, type=float)
    args = parser.parse_args()

    dataset = Cifar(batch_size=128, threads=2)
    model = WideResNet(16, 8, dropout=0.0, in_channels=3, labels=10).cuda()
    optimizer = SAM(model.parameters(), torch.optim.SGD, rho=args.rho, lr=args.lr, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")

    for epoch in range(args.epochs):
        model.train()
        for inputs, targets in dataset.train:
            inputs, targets = inputs.cuda(), targets.cuda()

            # climb to the neighbourhood's worst point
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(model(inputs), targets, label_smoothing=0.1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            optimizer.first_step(zero_grad=True)

            # descend from there
            with torch.autocast("cuda", dtype=torch.float16):
                second = F.cross_entropy(model(inputs), targets, label_smoothing=0.1)
            scaler.scale(second).backward()
            scaler.unscale_(optimizer)  # <- here
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
            optimizer.second_step(zero_grad=True)
            scaler.update()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
