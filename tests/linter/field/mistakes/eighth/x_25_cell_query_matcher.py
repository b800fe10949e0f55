# source: huggingface/transformers issue #25938
# mistake: the matching cost sums over 262144 pixels with einsum inside the float16 autocast region, the sums exceed 65504 and become infinite
# severity: error
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import nn

SIDE = 512


def pairwise_bce(logits, masks):
    """logits: (queries, SIDE*SIDE), masks: (cells, SIDE*SIDE) -> (queries, cells)."""
    pos = F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits), reduction="none")
    neg = F.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits), reduction="none")
    total = torch.einsum("qp,cp->qc", pos, masks) + torch.einsum("qp,cp->qc", neg, 1 - masks)  # <- here
    return total / logits.shape[1]  # <- here


def pairwise_dice(logits, masks):
    with torch.autocast("cuda", enabled=False):
        p = logits.float().sigmoid()
        inter = 2 * p @ masks.float().t()
        size = p.sum(-1)[:, None] + masks.float().sum(-1)[None]
    return 1 - (inter + 1) / (size + 1)


class Matcher(nn.Module):
    def __init__(self, w_class=2.0, w_bce=5.0, w_dice=5.0):
        super().__init__()
        self.w = w_class, w_bce, w_dice

    @torch.no_grad()
    def forward(self, class_logits, mask_logits, targets):
        found = []
        for cl, ml, t in zip(class_logits, mask_logits, targets):
            masks = t["masks"].flatten(1).to(ml.dtype)
            ml = ml.flatten(1)
            c_class = -cl.float().softmax(-1)[:, t["labels"]]
            cost = self.w[0] * c_class + self.w[1] * pairwise_bce(ml, masks) + self.w[2] * pairwise_dice(ml, masks)  # <- here
            q, c = linear_sum_assignment(cost.float().cpu().numpy())
            found.append((torch.as_tensor(q, device=ml.device), torch.as_tensor(c, device=ml.device)))
        return found


class SetLoss(nn.Module):
    def __init__(self, classes, matcher):
        super().__init__()
        self.matcher = matcher
        weight = torch.ones(classes + 1)
        weight[-1] = 0.1
        self.register_buffer("weight", weight)

    def forward(self, class_logits, mask_logits, targets):
        pairs = self.matcher(class_logits, mask_logits, targets)
        wanted = torch.full(class_logits.shape[:2], len(self.weight) - 1, device=class_logits.device)
        mask_losses = []
        for i, (q, c) in enumerate(pairs):
            wanted[i, q] = targets[i]["labels"][c]
            ml = mask_logits[i, q].float()
            mask_losses.append(F.binary_cross_entropy_with_logits(ml, targets[i]["masks"][c].float()))
        l_class = F.cross_entropy(class_logits.float().transpose(1, 2), wanted, self.weight)
        return 2 * l_class + 5 * torch.stack(mask_losses).mean()


def train_epoch(model, set_loss, loader, optimizer, scaler):
    """The model returns class logits (B, Q, C+1) and mask logits (B, Q, SIDE, SIDE)."""
    model.train()
    for images, targets in loader:
        images = images.cuda()
        targets = [{k: v.cuda() for k, v in t.items()} for t in targets]
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            class_logits, mask_logits = model(images)
            loss = set_loss(class_logits, mask_logits, targets)  # <- here
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        yield loss.item()
