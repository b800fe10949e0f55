# style of: k2-fsa/icefall:egs/librispeech/ASR/zipformer/train.py
# torch: 1.10+
import logging

import torch
import torch.nn.functional as F
from torch.cuda.amp import GradScaler


def compute_loss(params, model, batch, device, is_training):
    feature = batch["inputs"].to(device)
    lens = batch["num_frames"].to(device)
    targets = batch["targets"].to(device)
    target_lens = batch["target_lens"].to(device)
    with torch.set_grad_enabled(is_training):
        logits, out_lens = model(feature, lens)
        # the loss is computed in float32, whatever the encoder ran in
        with torch.cuda.amp.autocast(enabled=False):
            log_probs = F.log_softmax(logits.float(), dim=-1).transpose(0, 1)
            loss = F.ctc_loss(
                log_probs, targets, out_lens, target_lens, blank=params.blank_id, reduction="sum", zero_infinity=True
            )
    return loss, {"frames": int(out_lens.sum()), "loss": loss.detach().cpu().item()}


def train_one_epoch(params, model, optimizer, scheduler, train_dl, scaler, device):
    model.train()
    for batch_idx, batch in enumerate(train_dl):
        params.batch_idx_train += 1
        try:
            with torch.cuda.amp.autocast(enabled=params.use_fp16):
                loss, info = compute_loss(params, model, batch, device, is_training=True)
            scaler.scale(loss).backward()
            scheduler.step_batch(params.batch_idx_train)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        except Exception:
            logging.error("failing batch shape: %s", tuple(batch["inputs"].shape))
            raise

        if batch_idx % 100 == 0 and params.use_fp16:
            # the scale is at least checked once in a while: with a long growth interval,
            # it can be slow to climb back after a run of overflows
            cur_grad_scale = scaler.get_scale()
            if cur_grad_scale < 8.0 or (cur_grad_scale < 32.0 and batch_idx % 400 == 0):
                scaler.update(cur_grad_scale * 2.0)
            if cur_grad_scale < 0.01:
                logging.warning("Grad scale is small: %f", cur_grad_scale)
            if cur_grad_scale < 1.0e-05:
                raise RuntimeError(f"grad_scale is too small, exiting: {cur_grad_scale}")

        if batch_idx % params.log_interval == 0:
            scale = scaler.get_scale() if params.use_fp16 else 1.0
            logging.info("batch %d %s grad_scale %s", batch_idx, info, scale)


def run(params, model, optimizer, scheduler, train_dl, device, checkpoints=None):
    scaler = GradScaler(enabled=params.use_fp16, init_scale=1.0, growth_interval=500)
    if checkpoints and checkpoints.get("grad_scaler"):
        logging.info("Loading grad scaler state dict")
        scaler.load_state_dict(checkpoints["grad_scaler"])
    for epoch in range(params.start_epoch, params.num_epochs + 1):
        scheduler.step_epoch(epoch - 1)
        train_one_epoch(params, model, optimizer, scheduler, train_dl, scaler, device)
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "grad_scaler": scaler.state_dict(),
                "epoch": epoch,
            },
            f"{params.exp_dir}/epoch-{epoch}.pt",
        )
