# why correct: the matching costs (with their 1e-8) are computed in float32 with autocast off, and the per-step scheduler advances only if the scaler did not back off
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import nn
from torchvision.ops import box_convert, generalized_box_iou


class Assigner(nn.Module):
    def __init__(self, w_cls=2.0, w_l1=5.0, w_giou=2.0, alpha=0.25, gamma=2.0):
        super().__init__()
        self.w = (w_cls, w_l1, w_giou)
        self.alpha, self.gamma = alpha, gamma

    @torch.no_grad()
    @torch.autocast("cuda", enabled=False)
    def forward(self, logits, boxes, targets):
        p, b = logits.float().sigmoid(), boxes.float()
        pairs = []
        for i, t in enumerate(targets):
            neg = (1 - self.alpha) * p[i] ** self.gamma * -(1 - p[i] + 1e-8).log()
            pos = self.alpha * (1 - p[i]) ** self.gamma * -(p[i] + 1e-8).log()
            cls = (pos - neg)[:, t["labels"]]
            l1 = torch.cdist(b[i], t["boxes"], p=1)
            giou = -generalized_box_iou(box_convert(b[i], "cxcywh", "xyxy"), box_convert(t["boxes"], "cxcywh", "xyxy"))
            cost = self.w[0] * cls + self.w[1] * l1 + self.w[2] * giou
            q, k = linear_sum_assignment(cost.cpu().numpy())
            pairs.append((torch.as_tensor(q), torch.as_tensor(k)))
        return pairs


def set_loss(logits, boxes, targets, pairs):
    logits, boxes = logits.float(), boxes.float()
    goal = torch.zeros_like(logits)
    src, dst = [], []
    for i, ((q, k), t) in enumerate(zip(pairs, targets)):
        goal[i, q, t["labels"][k]] = 1.0
        src.append(boxes[i, q])
        dst.append(t["boxes"][k])
    src, dst = torch.cat(src), torch.cat(dst)
    n = max(len(dst), 1)
    ce = F.binary_cross_entropy_with_logits(logits, goal, reduction="none")
    pt = torch.exp(-ce)
    cls = (ce * (1 - pt) ** 2).sum() / n
    l1 = F.l1_loss(src, dst, reduction="sum") / n
    giou = (1 - torch.diag(generalized_box_iou(box_convert(src, "cxcywh", "xyxy"),
                                               box_convert(dst, "cxcywh", "xyxy")))).sum() / n
    return 2 * cls + 5 * l1 + 2 * giou


def train(net, loader, steps, lr=1e-4, device="cuda"):
    net, match = net.to(device), Assigner()
    opt = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, lr, total_steps=steps)
    scaler = torch.amp.GradScaler("cuda")
    it = 0
    while it < steps:
        for images, targets in loader:
            targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
            with torch.autocast("cuda", dtype=torch.float16):
                logits, boxes = net(images.to(device))
                pairs = match(logits, boxes, targets)
            loss = set_loss(logits, boxes, targets, pairs)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            before = scaler.get_scale()
            scaler.step(opt)
            scaler.update()
            if scaler.get_scale() >= before:
                sched.step()
            it += 1
            if it >= steps:
                break
    torch.save(net.state_dict(), "detector.pt")
