# source: https://github.com/milesial/Pytorch-UNet/issues/468
# mistake: the norm is clipped to 1.0 while the gradients still carry the loss scale, so nearly every update is shrunk by a factor that depends on the scale.
# severity: error
# torch: any
import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader


def fit(net: nn.Module, train_set, device, epochs=5, batch_size=4, lr=1e-4, amp=True, gradient_clipping=1.0):
    loader = DataLoader(train_set, batch_size=batch_size, shuffle=True, num_workers=4, pin_memory=True)
    opt = torch.optim.RMSprop(net.parameters(), lr=lr, weight_decay=1e-8, momentum=0.9)
    grad_scaler = torch.amp.GradScaler("cuda", enabled=amp)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(1, epochs + 1):
        net.train()
        running = 0.0
        for batch in loader:
            scans = batch["image"].to(device, dtype=torch.float32, memory_format=torch.channels_last)
            labels = batch["mask"].to(device, dtype=torch.long)

            with torch.autocast(device.type, dtype=torch.float16, enabled=amp):
                logits = net(scans)
                loss = criterion(logits, labels)
                loss = loss + 1 - F.softmax(logits, dim=1).gather(1, labels[:, None]).mean()

            opt.zero_grad(set_to_none=True)
            grad_scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), gradient_clipping)  # <- here
            grad_scaler.step(opt)
            grad_scaler.update()
            running += loss.item()
        print(f"epoch {epoch}: {running / len(loader):.4f}")


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--amp", action="store_true")
    return p.parse_args()


if __name__ == "__main__":
    from segdata import CarDataset, build_unet

    args = get_args()
    cuda = torch.device("cuda")
    fit(build_unet(n_classes=2).to(cuda), CarDataset("data"), cuda, epochs=args.epochs, amp=args.amp)
