# source: https://github.com/TorchSSL/TorchSSL/pull/59
# mistake: the gradients are clipped while they still carry the loss scale, so max_norm is compared with a norm ~2**16 too large and every update shrinks to almost nothing
# severity: error
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.cuda.amp import GradScaler, autocast
from torchvision.models import resnet18


def get_args():
    p = argparse.ArgumentParser("semi-supervised satellite tiles")
    p.add_argument("--lr", type=float, default=0.03)
    p.add_argument("--threshold", type=float, default=0.95)
    p.add_argument("--lambda-u", type=float, default=1.0)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--iters", type=int, default=100_000)
    p.add_argument("--amp", action="store_true")
    return p.parse_args()


def consistency_loss(logits_weak, logits_strong, tau):
    with torch.no_grad():
        probs = torch.softmax(logits_weak.float(), dim=1)
        conf, pseudo = probs.max(dim=1)
        keep = conf.ge(tau).float()
    per_item = F.cross_entropy(logits_strong, pseudo, reduction="none")
    return (per_item * keep).mean(), keep.mean()


def update_weights(net, opt, sched, scaler, loss, clip):
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()  # <- here
    if clip > 0:
        nn.utils.clip_grad_norm_(net.parameters(), clip)  # <- here
    scaler.step(opt)
    scaler.update()
    sched.step()


def fit(net, labelled, unlabelled, args):
    decay, no_decay = [], []
    for name, p in net.named_parameters():
        (no_decay if p.ndim == 1 or name.endswith(".bias") else decay).append(p)
    opt = torch.optim.SGD(
        [{"params": decay, "weight_decay": 5e-4}, {"params": no_decay, "weight_decay": 0.0}],
        lr=args.lr, momentum=0.9, nesterov=True,
    )
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.iters)
    scaler = GradScaler(enabled=args.amp)
    ce = nn.CrossEntropyLoss()

    for it, ((x, y), (u_w, u_s)) in enumerate(zip(labelled, unlabelled)):
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        u_w, u_s = u_w.cuda(non_blocking=True), u_s.cuda(non_blocking=True)
        with autocast(enabled=args.amp):
            out = net(torch.cat([x, u_w, u_s]))
            lx, lw, ls = out.split([len(x), len(u_w), len(u_s)])
            sup = ce(lx, y)
            unsup, used = consistency_loss(lw.detach(), ls, args.threshold)
            loss = sup + args.lambda_u * unsup
        update_weights(net, opt, sched, scaler, loss, args.clip)
        if it % 200 == 0:
            print(f"{it:6d} sup {sup.item():.3f} unsup {unsup.item():.3f} used {used.item():.2f}")
        if it >= args.iters:
            break


def main(make_loaders):
    args = get_args()
    net = resnet18(num_classes=10).cuda()
    labelled, unlabelled = make_loaders()
    fit(net, labelled, unlabelled, args)
    torch.save(net.state_dict(), "fixmatch_final.pt")
