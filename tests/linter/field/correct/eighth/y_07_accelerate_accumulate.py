# why correct: Accelerate divides by the accumulation steps and unscales in its own clip_grad_norm_, which is called only when gradients are synchronized; save_state keeps the scaler.
import os

import hydra
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration
from omegaconf import DictConfig
from torch.utils.data import DataLoader

from seis.data import Traces
from seis.model import PhasePicker


def weighted_ce(logits, target, weight):
    logp = logits.float().log_softmax(1)
    return -(target * logp * weight[None, :, None]).sum(1).mean()


@torch.no_grad()
def residual(accelerator, model, loader):
    model.eval()
    errs = []
    for wave, target, pick in loader:
        prob = model(wave).float().softmax(1)
        guess = prob[:, 0].argmax(-1)
        errs.append(accelerator.gather_for_metrics((guess - pick).abs().float()))
    model.train()
    return torch.cat(errs).median().item()


@hydra.main(version_base=None, config_path="conf", config_name="pick")
def main(cfg: DictConfig):
    accelerator = Accelerator(
        mixed_precision="fp16",
        gradient_accumulation_steps=cfg.accumulate,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=False)],
        project_config=ProjectConfiguration(project_dir=cfg.out, automatic_checkpoint_naming=True, total_limit=3),
    )
    model = PhasePicker(**cfg.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    train_dl = DataLoader(Traces(cfg.data, "train"), cfg.batch, shuffle=True, num_workers=8, drop_last=True)
    valid_dl = DataLoader(Traces(cfg.data, "dev"), cfg.batch, num_workers=4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, cfg.lr, total_steps=cfg.epochs * (len(train_dl) // cfg.accumulate + 1))
    model, optimizer, train_dl, valid_dl, scheduler = accelerator.prepare(
        model, optimizer, train_dl, valid_dl, scheduler)
    weight = torch.tensor(cfg.weight, device=accelerator.device)

    if cfg.resume and os.path.isdir(cfg.resume):
        accelerator.load_state(cfg.resume)

    for epoch in range(cfg.epochs):
        model.train()
        for wave, target, _ in train_dl:
            with accelerator.accumulate(model):
                loss = weighted_ce(model(wave), target, weight)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), cfg.clip)
                    if accelerator.is_main_process and torch.is_tensor(norm) and not torch.isfinite(norm):
                        print("overflow, this step will be skipped")
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} median residual {residual(accelerator, model, valid_dl):.1f} samples")
        accelerator.save_state()

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), os.path.join(cfg.out, "picker.pt"))


if __name__ == "__main__":
    main()
