# why correct: the averaged weights are float32 whatever the type of the tracked parameters; only the snapshot for inference is cast to bfloat16
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class Shadow:
    def __init__(self, net, decay=0.9999, warm=2000):
        self.decay, self.warm, self.count = decay, warm, 0
        self.values = [p.detach().to(torch.float32, copy=True) for p in net.parameters()]

    @torch.no_grad()
    def absorb(self, net):
        self.count += 1
        d = min(self.decay, self.count / (self.count + self.warm))
        fresh = [p.detach().float() for p in net.parameters()]
        torch._foreach_lerp_(self.values, fresh, 1.0 - d)

    @torch.no_grad()
    def snapshot(self, net, dtype=torch.bfloat16):
        twin = copy.deepcopy(net).eval()
        for p, v in zip(twin.parameters(), self.values):
            p.copy_(v)
        return twin.to(dtype)

    def state_dict(self):
        return {"values": self.values, "count": self.count}

    def load_state_dict(self, blob):
        for mine, theirs in zip(self.values, blob["values"]):
            mine.copy_(theirs)
        self.count = blob["count"]


class TextToMel(nn.Module):
    def __init__(self, symbols=180, mels=80, dim=384):
        super().__init__()
        self.emb = nn.Embedding(symbols, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 6)
        self.flow = nn.Sequential(nn.Linear(dim + mels + 1, 1024), nn.SiLU(), nn.Linear(1024, mels))

    def forward(self, text, up, noisy, t):
        h = self.enc(self.emb(text))
        h = torch.gather(h, 1, up.unsqueeze(-1).expand(-1, -1, h.size(-1)))
        return self.flow(torch.cat([h, noisy.to(h.dtype), t[:, None, None].expand(*noisy.shape[:2], 1).to(h.dtype)], -1))


def train(net, loader, steps):
    net = net.cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=2e-4)
    scaler = torch.amp.GradScaler("cuda")
    ema = Shadow(net)
    for step, (text, up, mel) in zip(range(steps), loader):
        text, up, mel = text.cuda(), up.cuda(), mel.cuda()
        t, eps = torch.rand(len(mel), device="cuda"), torch.randn_like(mel)
        noisy = torch.lerp(eps, mel, t[:, None, None])
        with torch.autocast("cuda", dtype=torch.float16):
            speed = net(text, up, noisy, t)
        loss = F.mse_loss(speed.float(), mel - eps)
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        ema.absorb(net)
        if step % 10_000 == 0:
            torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "scaler": scaler.state_dict(), "ema": ema.state_dict()}, "tts.pt")
    return ema.snapshot(net)
