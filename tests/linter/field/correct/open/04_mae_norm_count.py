# style of: facebookresearch/mae:util/misc.py
# torch: 1.6+
from pathlib import Path

import torch


class GradNormScaler:
    """Scale, back-propagate, and (on update steps) unscale, clip and step."""

    state_dict_key = "amp_scaler"

    def __init__(self):
        self._scaler = torch.cuda.amp.GradScaler()

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, create_graph=False, update_grad=True):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if not update_grad:
            return None
        params = list(parameters)
        self._scaler.unscale_(optimizer)
        if clip_grad is not None:
            norm = torch.nn.utils.clip_grad_norm_(params, clip_grad)
        else:
            norm = global_norm(params)
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict):
        self._scaler.load_state_dict(state_dict)


def global_norm(params, norm_type=2.0):
    grads = [p.grad.detach() for p in params if p.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    device = grads[0].device
    if norm_type == float("inf"):
        return max(g.abs().max().to(device) for g in grads)
    return torch.norm(torch.stack([torch.norm(g, norm_type).to(device) for g in grads]), norm_type)


def save_model(args, epoch, raw_model, optimizer, loss_scaler):
    target = Path(args.output_dir) / f"checkpoint-{epoch}.pth"
    torch.save(
        {
            "model": raw_model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": epoch,
            "scaler": loss_scaler.state_dict(),
        },
        target,
    )


def load_model(args, raw_model, optimizer, loss_scaler):
    if not args.resume:
        return
    checkpoint = torch.load(args.resume, map_location="cpu")
    raw_model.load_state_dict(checkpoint["model"])
    if "optimizer" in checkpoint and "epoch" in checkpoint and not args.eval:
        optimizer.load_state_dict(checkpoint["optimizer"])
        args.start_epoch = checkpoint["epoch"] + 1
        if "scaler" in checkpoint:
            loss_scaler.load_state_dict(checkpoint["scaler"])
