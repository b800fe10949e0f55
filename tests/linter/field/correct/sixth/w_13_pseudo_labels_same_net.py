# why correct: the pseudo-labels come from the same network under no_grad but in an autocast region of their own, which ends (and drops its weight cache) before the trained pass
import torch
import torch.nn.functional as F
from torch import nn


class Views:
    def __init__(self, weak, strong):
        self.weak, self.strong = weak, strong

    def __call__(self, x):
        return self.weak(x), self.strong(x)


def half():
    return torch.autocast(device_type="cuda", dtype=torch.float16)


def pseudo(net, weak, threshold):
    was = net.training
    net.eval()
    with torch.no_grad():
        with half():
            logits = net(weak)
        conf, label = logits.float().softmax(-1).max(-1)
    net.train(was)
    return label, (conf >= threshold).float()


def fixmatch_loss(net, x, y, weak, strong, threshold=0.95, weight=1.0):
    label, use = pseudo(net, weak, threshold)
    with half():
        out = net(torch.cat([x, strong]))
    out_l, out_u = out.float().split([len(x), len(strong)])
    supervised = F.cross_entropy(out_l, y)
    consistency = (F.cross_entropy(out_u, label, reduction="none") * use).mean()
    return supervised + weight * consistency, use.mean()


def one_region_loss(net, x, y, weak, strong, threshold=0.95):
    """The same with a single region; no cache, hence no stale casts."""
    with torch.autocast("cuda", dtype=torch.float16, cache_enabled=False):
        with torch.no_grad():
            conf, label = net(weak).float().softmax(-1).max(-1)
        out = net(torch.cat([x, strong])).float()
    use = (conf >= threshold).float()
    sup = F.cross_entropy(out[: len(x)], y)
    uns = (F.cross_entropy(out[len(x):], label, reduction="none") * use).mean()
    return sup + uns, use.mean()


LOSSES = {"split": fixmatch_loss, "single": one_region_loss}


def fit(net, labelled, unlabelled, views, steps, kind="split", lr=0.03):
    net = net.cuda()
    loss_fn = LOSSES[kind]
    opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    scaler = torch.amp.GradScaler("cuda")
    stream_l, stream_u = iter(labelled), iter(unlabelled)
    for step in range(steps):
        try:
            x, y = next(stream_l)
        except StopIteration:
            stream_l = iter(labelled)
            x, y = next(stream_l)
        try:
            u = next(stream_u)
        except StopIteration:
            stream_u = iter(unlabelled)
            u = next(stream_u)
        weak, strong = views(u.cuda(non_blocking=True))
        loss, used = loss_fn(net, x.cuda(), y.cuda(), weak, strong)
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        scaler.step(opt)
        scaler.update()
        sched.step()
        if step % 200 == 0:
            print(f"{step} loss {loss.item():.3f} used {used.item():.2%}")
    return net
