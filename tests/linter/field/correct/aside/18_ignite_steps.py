# style of: pytorch/ignite:ignite/engine/__init__.py
# torch: 1.6+
from typing import Callable, Optional, Tuple, Union

import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver


def check_arg(amp_mode: Optional[str], scaler: Union[bool, "torch.cuda.amp.GradScaler"]) -> Tuple:
    if amp_mode != "amp" and scaler:
        raise ValueError(f"scaler argument is {scaler}, but amp_mode is {amp_mode}")
    if amp_mode == "amp" and isinstance(scaler, bool):
        scaler = torch.cuda.amp.GradScaler(enabled=scaler)
        return "amp", scaler
    return amp_mode, scaler or None


def amp_step(model, optimizer, loss_fn, device, scaler=None, gradient_accumulation_steps=1) -> Callable:
    def update(engine, batch):
        if (engine.state.iteration - 1) % gradient_accumulation_steps == 0:
            optimizer.zero_grad()
        model.train()
        x, y = batch[0].to(device), batch[1].to(device)
        with torch.cuda.amp.autocast(enabled=True):
            loss = loss_fn(model(x), y) / gradient_accumulation_steps
        if scaler:
            scaler.scale(loss).backward()
            if engine.state.iteration % gradient_accumulation_steps == 0:
                scaler.step(optimizer)
                scaler.update()
        else:
            loss.backward()
            if engine.state.iteration % gradient_accumulation_steps == 0:
                optimizer.step()
        return loss.item() * gradient_accumulation_steps

    return update


def create_trainer(model, optimizer, loss_fn, device, scaler=True, accumulation=1, save_dir="ckpt", resume=None):
    _, scaler = check_arg("amp", scaler)
    trainer = Engine(amp_step(model, optimizer, loss_fn, device, scaler, accumulation))

    to_save = {"trainer": trainer, "model": model, "optimizer": optimizer}
    if scaler is not None:
        to_save["scaler"] = scaler
    handler = Checkpoint(to_save, DiskSaver(save_dir, require_empty=False), n_saved=2)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, handler)

    @trainer.on(Events.ITERATION_COMPLETED(every=100))
    def log_loss(engine):
        print(engine.state.epoch, engine.state.iteration, engine.state.output)

    if resume is not None:
        Checkpoint.load_objects(to_load=to_save, checkpoint=torch.load(resume, map_location="cpu"))
    return trainer
