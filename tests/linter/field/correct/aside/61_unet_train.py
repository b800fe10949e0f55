# style of: milesial/Pytorch-UNet:train.py
# torch: 1.13+
import argparse
import logging
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim

from evaluate import evaluate
from unet import UNet
from utils.dice_score import dice_loss


def train_model(model, device, train_loader, val_loader, epochs=5, learning_rate=1e-5, amp=False, gradient_clipping=1.0, save_dir="ckpt"):
    optimizer = optim.RMSprop(model.parameters(), lr=learning_rate, weight_decay=1e-8, momentum=0.9)
    # maximises the Dice score
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    grad_scaler = torch.cuda.amp.GradScaler(enabled=amp)
    criterion = nn.CrossEntropyLoss() if model.n_classes > 1 else nn.BCEWithLogitsLoss()
    global_step = 0

    for epoch in range(1, epochs + 1):
        model.train()
        epoch_loss = 0.0
        for batch in train_loader:
            images = batch["image"].to(device=device, dtype=torch.float32, memory_format=torch.channels_last)
            true_masks = batch["mask"].to(device=device, dtype=torch.long)

            with torch.autocast(device.type if device.type != "mps" else "cpu", enabled=amp):
                masks_pred = model(images)
                if model.n_classes == 1:
                    loss = criterion(masks_pred.squeeze(1), true_masks.float())
                    loss += dice_loss(torch.sigmoid(masks_pred.squeeze(1)).float(), true_masks.float())
                else:
                    loss = criterion(masks_pred, true_masks)
                    loss += dice_loss(
                        F.softmax(masks_pred, dim=1).float(),
                        F.one_hot(true_masks, model.n_classes).permute(0, 3, 1, 2).float(),
                        multiclass=True,
                    )

            optimizer.zero_grad(set_to_none=True)
            grad_scaler.scale(loss).backward()
            grad_scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), gradient_clipping)
            grad_scaler.step(optimizer)
            grad_scaler.update()
            global_step += 1
            epoch_loss += loss.item()

        val_score = evaluate(model, val_loader, device, amp)
        scheduler.step(val_score)
        logging.info("epoch %d: loss %.4f, Dice %.4f", epoch, epoch_loss / len(train_loader), val_score)
        Path(save_dir).mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), f"{save_dir}/weights_epoch{epoch}.pth")


def get_args():
    parser = argparse.ArgumentParser(description="Train the UNet on images and target masks")
    parser.add_argument("--epochs", "-e", type=int, default=5)
    parser.add_argument("--learning-rate", "-l", type=float, default=1e-5)
    parser.add_argument("--amp", action="store_true", default=False, help="Use mixed precision")
    parser.add_argument("--classes", "-c", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    from utils.data import loaders

    args = get_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = UNet(n_channels=3, n_classes=args.classes).to(memory_format=torch.channels_last).to(device)
    train_loader, val_loader = loaders()
    train_model(net, device, train_loader, val_loader, args.epochs, args.learning_rate, amp=args.amp and device.type == "cuda")
