# source: https://github.com/k2-fsa/icefall/pull/2081
# mistake: the unscale_ call was commented out, so clip_grad_norm_ works on gradients that still carry the loss scale.
# severity: error
# torch: any
import logging

import torch
import torch.nn as nn
from torch.amp import GradScaler, autocast


def compute_loss(params, model, batch, device):
    feats = batch["video"].to(device)
    targets = batch["targets"].to(device)
    lengths = batch["lengths"]
    log_probs = model(feats).log_softmax(-1).transpose(0, 1)
    loss = nn.functional.ctc_loss(log_probs.float(), targets, lengths["in"], lengths["out"], blank=0, reduction="sum")
    return loss / targets.size(0)


def train_one_epoch(params, model, optimizer, train_dl, scaler, device):
    model.train()
    for batch_idx, batch in enumerate(train_dl):
        params["batch_idx_train"] += 1
        with autocast("cuda", enabled=params["use_fp16"], dtype=torch.float16):
            loss = compute_loss(params, model, batch, device)

        scaler.scale(loss).backward()

        # scaler.unscale_(optimizer)

        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # <- here

        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

        if batch_idx % params["log_interval"] == 0:
            logging.info("batch %d loss %.4f norm %.3f", batch_idx, loss.item(), grad_norm)


def run(model, train_dl, num_epochs, use_fp16=True):
    device = torch.device("cuda", 0)
    model.to(device)
    params = {"batch_idx_train": 0, "log_interval": 50, "use_fp16": use_fp16}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    scaler = GradScaler("cuda", enabled=use_fp16)
    for _ in range(num_epochs):
        train_one_epoch(params, model, optimizer, train_dl, scaler, device)
