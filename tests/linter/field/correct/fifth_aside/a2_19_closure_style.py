# why correct: optimizer.step(closure) is used with bfloat16 autocast and no GradScaler; only the frozen VGG runs under autocast, Gram matrices and losses are float32
import torch
import torch.nn.functional as F
from torchvision.models import VGG19_Weights, vgg19

STYLE = (1, 6, 11, 20, 29)
CONTENT = 22


class Features(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = vgg19(weights=VGG19_Weights.DEFAULT).features[:30].eval().requires_grad_(False)
        for m in self.net:
            if isinstance(m, torch.nn.ReLU):
                m.inplace = False
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))

    def forward(self, img):
        x = (img - self.mean) / self.std
        out = {}
        with torch.autocast("cuda", dtype=torch.bfloat16):
            for i, layer in enumerate(self.net):
                x = layer(x)
                if i in STYLE or i == CONTENT:
                    out[i] = x
        return {k: v.float() for k, v in out.items()}


def gram(f):
    b, c, h, w = f.shape
    f = f.view(b, c, h * w)
    return torch.bmm(f, f.transpose(1, 2)) / (c * h * w)


def tv(x):
    return (x[..., 1:, :] - x[..., :-1, :]).abs().mean() + (x[..., 1:] - x[..., :-1]).abs().mean()


def transfer(content, style, steps=600, w_style=1e5, w_tv=1e-2, lr=0.02):
    feats = Features().cuda()
    content, style = content.cuda(), style.cuda()
    with torch.no_grad():
        goal = feats(content)[CONTENT]
        grams = {k: gram(v) for k, v in feats(style).items() if k in STYLE}
    canvas = torch.nn.Parameter(content.clone())
    opt = torch.optim.Adam([canvas], lr=lr)
    log = []

    def closure():
        opt.zero_grad(set_to_none=True)
        f = feats(canvas)
        c = F.mse_loss(f[CONTENT], goal)
        s = sum(F.mse_loss(gram(f[k]), grams[k]) for k in STYLE)
        loss = c + w_style * s + w_tv * tv(canvas)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([canvas], 10.0)
        log.append((c.detach(), s.detach()))
        return loss

    for i in range(steps):
        opt.step(closure)
        with torch.no_grad():
            canvas.clamp_(0, 1)
        if i % 100 == 0:
            print(i, *(v.item() for v in log[-1]))
    return canvas.detach().cpu()
