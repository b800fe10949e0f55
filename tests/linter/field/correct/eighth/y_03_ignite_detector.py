# why correct: the process function gets a long-lived scaler, unscales before clipping, and the scaler is among the checkpointed objects.
import fire
import ignite.distributed as idist
import torch
import torch.nn as nn
from ignite.contrib.engines import common
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver, TerminateOnNan, global_step_from_engine
from torch.cuda.amp import GradScaler, autocast

from defects.data import loaders
from defects.metrics import MeanAveragePrecision
from defects.model import Detector


def create_trainer(model, optimizer, scheduler, scaler, config):
    device = idist.device()
    mixed = config["with_amp"]

    def process(engine, batch):
        model.train()
        images = [i.to(device, non_blocking=True) for i in batch[0]]
        targets = [{k: v.to(device, non_blocking=True) for k, v in t.items()} for t in batch[1]]
        with autocast(enabled=mixed):
            parts = model(images, targets)
            loss = sum(parts.values())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if config["clip"]:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), config["clip"])
        scaler.step(optimizer)
        scaler.update()
        return {"loss": loss.item(), **{k: v.item() for k, v in parts.items()}}

    trainer = Engine(process)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan(output_transform=lambda o: o["loss"]))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _: scheduler.step())
    return trainer


def create_evaluator(model, config):
    device = idist.device()

    @torch.no_grad()
    def process(engine, batch):
        model.eval()
        images = [i.to(device) for i in batch[0]]
        with autocast(enabled=config["with_amp"]):
            out = model(images)
        return [{k: v.float().cpu() if v.is_floating_point() else v.cpu() for k, v in o.items()} for o in out], batch[1]

    evaluator = Engine(process)
    MeanAveragePrecision().attach(evaluator, "mAP")
    return evaluator


def training(local_rank, config):
    torch.manual_seed(config["seed"] + idist.get_rank())
    train_dl, valid_dl = loaders(config["root"], config["batch"])
    model = idist.auto_model(Detector(num_classes=7))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9, weight_decay=1e-4))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [16, 22])
    scaler = GradScaler(enabled=config["with_amp"])
    trainer = create_trainer(model, optimizer, scheduler, scaler, config)
    evaluator = create_evaluator(model, config)

    to_save = {"trainer": trainer, "model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    common.setup_common_training_handlers(trainer, train_sampler=getattr(train_dl, "sampler", None),
                                          with_gpu_stats=False, output_names=["loss"], stop_on_nan=False)
    keeper = Checkpoint(to_save, DiskSaver(config["out"], require_empty=False), n_saved=2,
                        score_function=lambda e: e.state.metrics["mAP"], score_name="mAP",
                        global_step_transform=global_step_from_engine(trainer))
    evaluator.add_event_handler(Events.COMPLETED, keeper)

    @trainer.on(Events.EPOCH_COMPLETED(every=1))
    def validate(_):
        evaluator.run(valid_dl)

    if config["resume"]:
        Checkpoint.load_objects(to_load=to_save, checkpoint=torch.load(config["resume"], map_location="cpu"))
    trainer.run(train_dl, max_epochs=config["epochs"])


def run(root, out="out", lr=0.02, batch=8, epochs=26, clip=10.0, with_amp=True, seed=17, resume=None, nproc=None):
    config = dict(root=root, out=out, lr=lr, batch=batch, epochs=epochs, clip=clip, with_amp=with_amp, seed=seed,
                  resume=resume)
    with idist.Parallel(backend="nccl", nproc_per_node=nproc) as parallel:
        parallel.run(training, config)


if __name__ == "__main__":
    fire.Fire({"run": run})
