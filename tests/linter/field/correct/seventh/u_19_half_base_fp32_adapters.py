# why correct: only the frozen base is float16; the trained adapters are float32, so GradScaler sees float32 gradients
import torch
import torch.nn.functional as F
from torch import nn
from torch.cuda.amp import GradScaler, autocast


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear, rank=8, alpha=16.0):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, device=base.weight.device, dtype=torch.float32)
        self.up = nn.Linear(rank, base.out_features, bias=False, device=base.weight.device, dtype=torch.float32)
        nn.init.zeros_(self.up.weight)
        self.factor = alpha / rank

    def forward(self, x):
        return self.base(x) + self.factor * self.up(self.down(x))


def freeze_half(model):
    return model.half().requires_grad_(False)


def inject(model, names=("q_proj", "v_proj")):
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(parent, name, LowRank(child))
    return [p for p in model.parameters() if p.requires_grad]


def lm_loss(model, ids):
    with autocast(dtype=torch.float16):
        logits = model(ids[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def accumulate_and_step(model, params, optimizer, scaler, group):
    total = 0.0
    for ids in group:
        loss = lm_loss(model, ids.cuda())
        scaler.scale(loss / len(group)).backward()
        total += loss.item()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(params, 0.3)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return total / len(group)


def main(base_model, groups):
    model = freeze_half(base_model.cuda())
    params = inject(model)
    assert all(p.dtype is torch.float32 for p in params)
    optimizer = torch.optim.AdamW(params, lr=2e-4)
    scaler = GradScaler()
    model.train()
    for i, group in enumerate(groups):
        loss = accumulate_and_step(model, params, optimizer, scaler, group)
        if i % 10 == 0:
            print(i, loss)
    torch.save({k: v for k, v in model.state_dict().items() if ".down." in k or ".up." in k}, "adapter.pt")
