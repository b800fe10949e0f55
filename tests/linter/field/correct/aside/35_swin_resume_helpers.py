# style of: microsoft/Swin-Transformer:utils.py
# torch: 1.6+
import glob
import os

import torch


class NativeScaler:
    state_dict_key = "amp_scaler"

    def __init__(self, enabled=True):
        self._scaler = torch.cuda.amp.GradScaler(enabled=enabled)

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, update_grad=True):
        self._scaler.scale(loss).backward()
        if not update_grad:
            return None
        self._scaler.unscale_(optimizer)
        limit = float("inf") if clip_grad is None else clip_grad
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict):
        self._scaler.load_state_dict(state_dict)


def load_checkpoint(config, model, optimizer, lr_scheduler, loss_scaler, logger):
    logger.info(f"resuming from {config.MODEL.RESUME}")
    checkpoint = torch.load(config.MODEL.RESUME, map_location="cpu")
    logger.info(model.load_state_dict(checkpoint["model"], strict=False))
    max_accuracy = 0.0
    if not config.EVAL_MODE and all(k in checkpoint for k in ("optimizer", "lr_scheduler", "epoch")):
        optimizer.load_state_dict(checkpoint["optimizer"])
        lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
        config.defrost()
        config.TRAIN.START_EPOCH = checkpoint["epoch"] + 1
        config.freeze()
        # {} was written by a run with AMP off
        if checkpoint.get("scaler"):
            loss_scaler.load_state_dict(checkpoint["scaler"])
        max_accuracy = checkpoint.get("max_accuracy", 0.0)
    del checkpoint
    torch.cuda.empty_cache()
    return max_accuracy


def save_checkpoint(config, epoch, model, max_accuracy, optimizer, lr_scheduler, loss_scaler, logger):
    save_state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": lr_scheduler.state_dict(),
        "max_accuracy": max_accuracy,
        "scaler": loss_scaler.state_dict(),
        "epoch": epoch,
    }
    path = os.path.join(config.OUTPUT, f"ckpt_epoch_{epoch}.pth")
    torch.save(save_state, path)
    logger.info(f"{path} saved")


def auto_resume_helper(output_dir):
    checkpoints = glob.glob(os.path.join(output_dir, "*.pth"))
    return max(checkpoints, key=os.path.getmtime) if checkpoints else None
