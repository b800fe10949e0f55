# source: https://github.com/pytorch/pytorch/issues/153044
# mistake: autocast is entered outside a compiled model that keeps a float32 island; the compiled backward is traced under the forward's autocast, so the island's backward runs in float16 and can overflow.
# severity: warning
# torch: 2.x with torch._functorch.config.backward_pass_autocast "same_as_forward" (the default in 2.13)
import torch
import torch.nn as nn
import torch.nn.functional as F


class RatingHead(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.linear = nn.Linear(dim, 1)

    def forward(self, h):
        with torch.amp.autocast("cuda", enabled=False):  # <- here
            return self.linear(h.float()) * 4096.0


class RatingModel(nn.Module):
    def __init__(self, n_items, dim=128):
        super().__init__()
        self.items = nn.Embedding(n_items, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.head = RatingHead(dim)

    def forward(self, ids):
        return self.head(self.mlp(self.items(ids))).squeeze(-1)


def train(loader, n_items, epochs=3):
    model = RatingModel(n_items).cuda()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for ids, rating in loader:
            ids, rating = ids.cuda(), rating.cuda()
            optimizer.zero_grad()
            with torch.amp.autocast("cuda", dtype=torch.float16):
                pred = compiled(ids)  # <- here
                loss = F.smooth_l1_loss(pred, rating)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        print(epoch, loss.item())
    return model
