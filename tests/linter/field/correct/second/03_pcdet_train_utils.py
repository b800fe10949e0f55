"""
# style of: open-mmlab/OpenPCDet:tools/train_utils/train_utils.py
# correct: the scaler is made once, disabled without AMP, and handed to the epoch function; with enabled=False its methods pass through.
# torch: 1.7+
"""
import os

import torch
import tqdm
from torch.nn.utils import clip_grad_norm_


def train_one_epoch(model, optimizer, train_loader, model_func, optim_cfg, accumulated_iter, scaler, tbar, rank,
                    tb_log=None, use_amp=False, lr_scheduler=None):
    total_it = len(train_loader)
    for cur_it, batch in enumerate(train_loader):
        if lr_scheduler is not None:
            lr_scheduler(accumulated_iter)  # a function of the iteration, not of the steps taken
        cur_lr = optimizer.param_groups[0]["lr"]

        model.train()
        optimizer.zero_grad()
        with torch.cuda.amp.autocast(enabled=use_amp):
            loss, tb_dict, disp_dict = model_func(model, batch)

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), optim_cfg.GRAD_NORM_CLIP)
        scaler.step(optimizer)
        scaler.update()

        accumulated_iter += 1
        if rank == 0:
            disp_dict.update({"loss": loss.item(), "lr": cur_lr, "it": f"{cur_it}/{total_it}"})
            tbar.set_postfix(disp_dict)
            if tb_log is not None:
                tb_log.add_scalar("train/loss", loss.item(), accumulated_iter)
                tb_log.add_scalar("meta_data/learning_rate", cur_lr, accumulated_iter)
                for key, val in tb_dict.items():
                    tb_log.add_scalar("train/" + key, val, accumulated_iter)
    return accumulated_iter


def checkpoint_state(model=None, optimizer=None, scaler=None, epoch=None, it=None):
    return {
        "epoch": epoch,
        "it": it,
        "model_state": model.state_dict() if model is not None else None,
        "optimizer_state": optimizer.state_dict() if optimizer is not None else None,
        "scaler_state": scaler.state_dict() if scaler is not None else None,
    }


def train_model(model, optimizer, train_loader, model_func, optim_cfg, ckpt_dir, start_epoch=0, start_iter=0,
                total_epochs=80, rank=0, tb_log=None, use_amp=False, init_scale=2.0**16, resume=None):
    scaler = torch.cuda.amp.GradScaler(enabled=use_amp, init_scale=init_scale)
    accumulated_iter = start_iter
    if resume is not None and resume.get("scaler_state"):
        scaler.load_state_dict(resume["scaler_state"])
    with tqdm.trange(start_epoch, total_epochs, desc="epochs", disable=rank != 0) as tbar:
        for cur_epoch in tbar:
            accumulated_iter = train_one_epoch(
                model, optimizer, train_loader, model_func, optim_cfg, accumulated_iter, scaler, tbar, rank,
                tb_log=tb_log, use_amp=use_amp,
            )
            if rank == 0:
                state = checkpoint_state(model, optimizer, scaler, cur_epoch + 1, accumulated_iter)
                torch.save(state, os.path.join(ckpt_dir, f"checkpoint_epoch_{cur_epoch + 1}.pth"))
