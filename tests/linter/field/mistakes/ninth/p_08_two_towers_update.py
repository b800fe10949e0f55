# source: huggingface/accelerate#439
# mistake: scaler.update() is called between the steps of two optimizers whose losses were scaled together, so the second is unscaled with a factor that may have changed
# severity: warning
import torch
import torch.nn as nn
import torch.nn.functional as F


def mlp(sizes):
    layers = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        layers += [nn.Linear(a, b), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class UserItem:
    """User tower and item tower, trained with one joint objective and one auxiliary objective."""

    def __init__(self, user_dim, item_dim, device):
        self.user = mlp([user_dim, 512, 128]).to(device)
        self.item = mlp([item_dim, 512, 128]).to(device)
        self.rating = nn.Linear(128, 1).to(device)
        self.user_opt = torch.optim.Adam(self.user.parameters(), lr=1e-3)
        self.item_opt = torch.optim.Adagrad(
            list(self.item.parameters()) + list(self.rating.parameters()), lr=1e-2)
        self.scaler = torch.cuda.amp.GradScaler(init_scale=2.0 ** 14)

    def losses(self, users, items, stars):
        with torch.cuda.amp.autocast():
            u = self.user(users)
            v = self.item(items)
            logits = u @ v.t() / 11.3
            match = F.cross_entropy(logits, torch.arange(len(u), device=u.device))
            stars_hat = self.rating(v).squeeze(-1)
            aux = F.smooth_l1_loss(stars_hat.float(), stars)
        return match, aux

    def train_step(self, users, items, stars):
        match, aux = self.losses(users, items, stars)
        total = match + 0.1 * aux
        self.user_opt.zero_grad()
        self.item_opt.zero_grad()
        self.scaler.scale(total).backward()

        self.scaler.step(self.user_opt)
        self.scaler.update()  # <- here
        self.scaler.step(self.item_opt)  # <- here
        self.scaler.update()
        return match.detach(), aux.detach()


def fit(loader, user_dim, item_dim, epochs=5):
    device = torch.device("cuda")
    rec = UserItem(user_dim, item_dim, device)
    for e in range(epochs):
        for i, batch in enumerate(loader):
            m, a = rec.train_step(*(t.to(device) for t in batch))
            if i % 200 == 0:
                print(f"epoch {e} it {i} match {m.item():.4f} aux {a.item():.4f}")
    return rec
