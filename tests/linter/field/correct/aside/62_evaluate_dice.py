# style of: milesial/Pytorch-UNet:evaluate.py
# torch: 1.13+
import torch
import torch.nn.functional as F


def dice_coeff(pred, target, reduce_batch_first=False, epsilon=1e-6):
    """Both in float32: epsilon would vanish in float16."""
    assert pred.size() == target.size() and pred.dtype == torch.float32
    dims = (-1, -2, -3) if reduce_batch_first else (-1, -2)
    inter = 2 * (pred * target).sum(dim=dims)
    sets = pred.sum(dim=dims) + target.sum(dim=dims)
    sets = torch.where(sets == 0, inter, sets)
    return ((inter + epsilon) / (sets + epsilon)).mean()


def multiclass_dice_coeff(pred, target, epsilon=1e-6):
    return dice_coeff(pred.flatten(0, 1), target.flatten(0, 1), reduce_batch_first=True, epsilon=epsilon)


def expected_calibration_error(probs, labels, bins=15, eps=1e-12):
    conf, pred = probs.max(dim=1)
    edges = torch.linspace(0, 1, bins + 1, device=probs.device)
    error = torch.zeros((), device=probs.device)
    for lo, hi in zip(edges[:-1], edges[1:]):
        inside = (conf > lo) & (conf <= hi)
        weight = inside.float().mean()
        accuracy = (pred[inside] == labels[inside]).float().sum() / (inside.sum() + eps)
        confidence = conf[inside].sum() / (inside.sum() + eps)
        error += weight * (accuracy - confidence).abs()
    return error


@torch.inference_mode()
def evaluate(net, dataloader, device, amp):
    was_training = net.training
    net.eval()
    dice_score, ece, batches = 0.0, 0.0, 0
    with torch.autocast(device.type if device.type != "mps" else "cpu", enabled=amp):
        for batch in dataloader:
            image = batch["image"].to(device=device, dtype=torch.float32, memory_format=torch.channels_last)
            mask_true = batch["mask"].to(device=device, dtype=torch.long)
            logits = net(image).float()
            if net.n_classes == 1:
                mask_pred = (torch.sigmoid(logits.squeeze(1)) > 0.5).float()
                dice_score += dice_coeff(mask_pred, mask_true.float()).item()
            else:
                probs = F.softmax(logits, dim=1)
                one_hot = F.one_hot(mask_true, net.n_classes).permute(0, 3, 1, 2).float()
                hard = F.one_hot(probs.argmax(dim=1), net.n_classes).permute(0, 3, 1, 2).float()
                # the background is left out
                dice_score += multiclass_dice_coeff(hard[:, 1:], one_hot[:, 1:]).item()
                flat = probs.permute(0, 2, 3, 1).flatten(0, 2)
                ece += expected_calibration_error(flat, mask_true.flatten()).item()
            batches += 1
    net.train(was_training)
    print(f"ece {ece / max(batches, 1):.4f}")
    return dice_score / max(batches, 1)
