# why correct: with one scaler for two optimizers, the critic's step is inside the same condition as its backward, and update() is called once at the end
import torch
import torch.nn as nn
import torch.nn.functional as F


class SuperRes(nn.Module):
    def __init__(self, w=64, n=8):
        super().__init__()
        self.head = nn.Conv2d(3, w, 3, padding=1)
        self.mid = nn.ModuleList(nn.Conv2d(w, w, 3, padding=1) for _ in range(n))
        self.tail = nn.Sequential(nn.Conv2d(w, 48, 3, padding=1), nn.PixelShuffle(4))

    def forward(self, x):
        h = self.head(x)
        for m in self.mid:
            h = h + F.relu(m(h))
        return self.tail(h)


def make_critic():
    return nn.Sequential(
        nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(64, 128, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(128, 1, 3)
    )


def train(pairs, steps=300_000, start=50_000, use_amp=True):
    sr, critic = SuperRes().cuda(), make_critic().cuda()
    opt = torch.optim.Adam(sr.parameters(), 2e-4)
    opt_c = torch.optim.Adam(critic.parameters(), 1e-4)
    scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
    bce = nn.BCEWithLogitsLoss()

    for step, (low, high) in zip(range(steps), pairs):
        low, high = low.cuda(), high.cuda()
        adversarial = step >= start
        for p in critic.parameters():
            p.requires_grad_(False)
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
            out = sr(low)
            loss = F.l1_loss(out, high)
            if adversarial:
                s = critic(out)
                loss = loss + 5e-3 * bce(s, torch.ones_like(s))
        scaler.scale(loss).backward()
        scaler.step(opt)

        if adversarial:
            for p in critic.parameters():
                p.requires_grad_(True)
            opt_c.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
                r, f = critic(high), critic(out.detach())
                c_loss = bce(r, torch.ones_like(r)) + bce(f, torch.zeros_like(f))
            scaler.scale(c_loss).backward()
            scaler.step(opt_c)
        scaler.update()

        if step % 1000 == 0:
            print(step, loss.item())
            torch.save(
                {"sr": sr.state_dict(), "critic": critic.state_dict(), "opt": opt.state_dict(),
                 "opt_c": opt_c.state_dict(), "scaler": scaler.state_dict(), "step": step},
                "sr.pt",
            )


if __name__ == "__main__":
    from div import endless_pairs

    train(endless_pairs(96))
