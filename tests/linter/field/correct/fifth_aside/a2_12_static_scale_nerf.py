# why correct: the loss is multiplied by a constant by hand, gradients are divided by the same constant and checked for inf/nan before the plain optimizer step
import torch
import torch.nn.functional as F

STATIC_SCALE = 128.0


@torch.no_grad()
def undo_scale(params, factor):
    grads = [p.grad for p in params if p.grad is not None]
    torch._foreach_mul_(grads, 1.0 / factor)
    ok = torch.stack([torch.isfinite(g).all() for g in grads]).all()
    return bool(ok)


def composite(sigma, rgb, t):
    sigma, rgb, t = sigma.float(), rgb.float(), t.float()
    dt = torch.diff(t, dim=-1)
    tau = sigma[..., :-1] * dt
    alpha = 1 - torch.exp(-tau)
    trans = torch.exp(-(torch.cumsum(tau, -1) - tau))
    w = alpha * trans
    acc = w.sum(-1, keepdim=True)
    return (w[..., None] * rgb[..., :-1, :]).sum(-2) + 1 - acc, w


def distortion(w, t):
    mid = 0.5 * (t[..., 1:] + t[..., :-1])
    dt = torch.diff(t, dim=-1)
    pair = (mid[..., :, None] - mid[..., None, :]).abs()
    inter = (w[..., :, None] * w[..., None, :] * pair).sum((-1, -2))
    return (inter + (w.square() * dt).sum(-1) / 3).mean()


def train(grid, mlp, rays, steps=30_000, lr=1e-2, reg=1e-3):
    params = list(grid.parameters()) + list(mlp.parameters())
    opt = torch.optim.Adam(params, lr=lr, betas=(0.9, 0.99), eps=1e-15)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.1 ** (1 / steps))
    lost = 0
    for step in range(steps):
        o, d, target = (x.cuda() for x in rays.next(8192))
        t = torch.sort(torch.rand(len(o), 65, device="cuda") * 4 + 2, dim=-1).values
        xyz = o[:, None] + t[..., None] * d[:, None]
        with torch.autocast("cuda", dtype=torch.float16):
            feats = grid(xyz)
            raw = mlp(torch.cat([feats, d[:, None].expand_as(xyz)], -1))
        sigma = F.softplus(raw[..., 0].float() - 1)
        rgb = torch.sigmoid(raw[..., 1:4].float())
        pred, w = composite(sigma, rgb, t)
        loss = F.huber_loss(pred, target, delta=0.1) + reg * distortion(w, t)

        opt.zero_grad()
        (loss * STATIC_SCALE).backward()
        if undo_scale(params, STATIC_SCALE):
            opt.step()
        else:
            lost += 1
        sched.step()
        if step % 1000 == 0:
            print(step, loss.item(), "skipped", lost)
            torch.save({"grid": grid.state_dict(), "mlp": mlp.state_dict(), "opt": opt.state_dict(),
                        "sched": sched.state_dict(), "step": step}, "field.pt")
