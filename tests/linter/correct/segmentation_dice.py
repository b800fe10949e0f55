import torch
import torch.nn as nn
import torch.nn.functional as F


class DiceLoss(nn.Module):
    def __init__(self, smooth=1.0):
        super().__init__()
        self.smooth = smooth

    def forward(self, logits, target):
        p = torch.sigmoid(logits.float())
        inter = (p * target).sum(dim=(1, 2, 3))
        union = p.sum(dim=(1, 2, 3)) + target.sum(dim=(1, 2, 3))
        return 1 - ((2 * inter + self.smooth) / (union + self.smooth)).mean()


def train(net, loader, val_loader, epochs, amp: bool = False):
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-5, momentum=0.9, foreach=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    grad_scaler = torch.amp.GradScaler("cuda", enabled=amp)
    criterion = nn.BCEWithLogitsLoss()
    dice = DiceLoss()
    global_step = 0
    for epoch in range(1, epochs + 1):
        net.train()
        epoch_loss = torch.zeros((), device="cuda")
        for batch in loader:
            images, true_masks = batch["image"], batch["mask"]
            with torch.autocast("cuda", enabled=amp):
                masks_pred = net(images)
                loss = criterion(masks_pred.squeeze(1), true_masks.float())
                loss += dice(masks_pred, true_masks)
            optimizer.zero_grad(set_to_none=True)
            grad_scaler.scale(loss).backward()
            grad_scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            grad_scaler.step(optimizer)
            grad_scaler.update()
            global_step += 1
            epoch_loss += loss.detach()
            if global_step % 100 == 0:
                val_score = evaluate(net, val_loader, amp)
                scheduler.step(val_score)
    return F.relu(epoch_loss)


@torch.inference_mode()
def evaluate(net, dataloader, amp):
    net.eval()
    score = 0
    with torch.autocast("cuda", enabled=amp):
        for batch in dataloader:
            mask_pred = net(batch["image"])
            score += (torch.sigmoid(mask_pred) > 0.5).float().mean()
    net.train()
    return score / max(len(dataloader), 1)
