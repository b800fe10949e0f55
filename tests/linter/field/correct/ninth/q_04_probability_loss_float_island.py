# why correct: BCE on probabilities is evaluated with autocast disabled and float32 inputs, which is allowed and safe
import torch
import torch.nn as nn
import torch.nn.functional as F


class NoisyOr(nn.Module):
    """Bag-level label for whole-slide images: the bag is positive if any patch is."""

    def __init__(self, backbone, dim, classes):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(dim, classes)

    def forward(self, patches):
        b, n = patches.shape[:2]
        feats = self.backbone(patches.flatten(0, 1))
        logits = self.head(feats).view(b, n, -1)
        with torch.autocast(device_type="cuda", enabled=False):
            log_negative = F.logsigmoid(-logits.float()).sum(dim=1)
            return -torch.expm1(log_negative)


class BagLoss(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.register_buffer("weight", weight)
        self.bce = nn.BCELoss(reduction="none")

    def forward(self, prob, target):
        with torch.autocast(device_type="cuda", enabled=False):
            prob = prob.float().clamp(1e-6, 1 - 1e-6)
            return (self.bce(prob, target.float()) * self.weight).mean()


def fit(backbone, dim, classes, weight, loader, epochs=20):
    model = NoisyOr(backbone, dim, classes).cuda()
    loss_fn = BagLoss(weight).cuda()
    optimizer = torch.optim.AdamW([
        {"params": model.backbone.parameters(), "lr": 1e-5},
        {"params": model.head.parameters(), "lr": 1e-3},
    ])
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for patches, target in loader:
            patches, target = patches.cuda(non_blocking=True), target.cuda(non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(device_type="cuda", dtype=torch.float16):
                prob = model(patches)
                loss = loss_fn(prob, target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += loss.item()
        print(f"{epoch}: {total / len(loader):.4f}")
    return model
