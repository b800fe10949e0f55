# source: https://github.com/NVIDIA/apex/issues/1052
# mistake: attention scores that are float16 under autocast are filled with -1e9, which float16 cannot represent (RuntimeError: value cannot be converted to type at::Half without overflow)
# severity: error
import torch
import torch.nn as nn
import torch.nn.functional as F

NEG = -1e9  # <- here


def to_windows(x, w):
    b, h, wd, c = x.shape
    x = x.view(b, h // w, w, wd // w, w, c)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, c)


def from_windows(win, w, h, wd):
    b = win.shape[0] // (h * wd // w // w)
    x = win.view(b, h // w, wd // w, w, w, -1)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(b, h, wd, -1)


class ShiftedAttention(nn.Module):
    def __init__(self, dim, heads, window=7, shift=3):
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.scale = (dim // heads) ** -0.5
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def region_mask(self, h, w, device):
        ids = torch.zeros(1, h, w, 1, device=device)
        cuts = (slice(0, -self.window), slice(-self.window, -self.shift), slice(-self.shift, None))
        n = 0
        for a in cuts:
            for b in cuts:
                ids[:, a, b] = n
                n += 1
        flat = to_windows(ids, self.window).squeeze(-1)
        return flat[:, None, :] != flat[:, :, None]

    def forward(self, x):
        b, h, w, c = x.shape
        short = x
        x = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2))
        win = to_windows(x, self.window)
        n = win.shape[1]
        q, k, v = self.qkv(win).view(-1, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        hide = self.region_mask(h, w, x.device).repeat(b, 1, 1)
        scores = scores.masked_fill(hide[:, None], NEG)  # <- here
        att = scores.softmax(-1)
        y = (att @ v).transpose(1, 2).reshape(-1, n, c)
        y = from_windows(self.out(y), self.window, h, w)
        return short + torch.roll(y, (self.shift, self.shift), (1, 2))


class Classifier(nn.Module):
    def __init__(self, dim=96, depth=4, classes=200):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.blocks = nn.ModuleList(ShiftedAttention(dim, 3) for _ in range(depth))
        self.head = nn.Linear(dim, classes)

    def forward(self, img):
        x = self.patch(img).permute(0, 2, 3, 1)
        for blk in self.blocks:
            x = blk(x)
        return self.head(x.mean((1, 2)))


def train(loader, epochs=90):
    model = Classifier().cuda()
    opt = torch.optim.AdamW(model.parameters(), 5e-4, weight_decay=0.05)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(epochs):
        for img, label in loader:
            opt.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.float16):
                loss = F.cross_entropy(model(img.cuda()), label.cuda())
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(opt)
            scaler.update()
