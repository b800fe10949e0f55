# re-expressed from github.com/engichang1467/Open-Rig3R issue 35: forward ran in float16 autocast and nothing scaled the loss, so small gradients were flushed to zero
import json
import sys

import ignite.distributed as idist
import torch
import torch.nn as nn
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping, ProgressBar, global_step_from_engine
from ignite.metrics import Loss, MeanAbsoluteError, RunningAverage
from torch.optim.lr_scheduler import OneCycleLR
from torchvision.models import resnet34

from nyu import NYUDepth


class DepthNet(nn.Module):
    def __init__(self):
        super().__init__()
        r = resnet34(weights="DEFAULT")
        self.stem = nn.Sequential(r.conv1, r.bn1, r.relu, r.maxpool)
        self.stages = nn.ModuleList([r.layer1, r.layer2, r.layer3, r.layer4])
        self.lateral = nn.ModuleList(nn.Conv2d(c, 128, 1) for c in (64, 128, 256, 512))
        self.smooth = nn.Sequential(nn.Conv2d(128, 64, 3, 1, 1), nn.BatchNorm2d(64), nn.ReLU(True), nn.Conv2d(64, 1, 1))

    def forward(self, x):
        size, feats = x.shape[-2:], []
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
            feats.append(x)
        y = None
        for lat, f in zip(reversed(self.lateral), reversed(feats)):
            f = lat(f)
            y = f if y is None else f + nn.functional.interpolate(y, size=f.shape[-2:], mode="nearest")
        y = nn.functional.interpolate(self.smooth(y), size=size, mode="bilinear", align_corners=False)
        return nn.functional.softplus(y)


class LogL1(nn.Module):
    def forward(self, pred, target):
        valid = target > 0
        return (pred.float()[valid].clamp_min(1e-3).log() - target[valid].log()).abs().mean()


def masked_depth(output):
    pred, target = output
    valid = target > 0
    return pred.float()[valid], target[valid]


def run(local_rank, cfg):
    device = idist.device()
    torch.manual_seed(cfg["seed"] + idist.get_rank())
    train_loader = idist.auto_dataloader(NYUDepth(cfg["root"], "train"), batch_size=cfg["batch"], shuffle=True, num_workers=8)
    val_loader = idist.auto_dataloader(NYUDepth(cfg["root"], "val"), batch_size=cfg["batch"], num_workers=8)
    model = idist.auto_model(DepthNet())
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=cfg["lr"], weight_decay=1e-2))
    criterion = LogL1().to(device)

    trainer = create_supervised_trainer(  # <- here
        model,
        optimizer,
        criterion,
        device=device,
        non_blocking=True,
        amp_mode="amp",  # <- here
        gradient_accumulation_steps=cfg["accumulate"],
    )
    evaluator = create_supervised_evaluator(
        model,
        metrics={"mae": MeanAbsoluteError(masked_depth), "log_l1": Loss(LogL1())},
        device=device,
        amp_mode="amp",
    )

    schedule = OneCycleLR(optimizer, cfg["lr"], total_steps=cfg["epochs"] * len(train_loader))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: schedule.step())
    RunningAverage(output_transform=lambda x: x).attach(trainer, "loss")
    if idist.get_rank() == 0:
        ProgressBar(desc="train").attach(trainer, ["loss"])

    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(engine):
        evaluator.run(val_loader)
        if idist.get_rank() == 0:
            m = evaluator.state.metrics
            print(f"[{engine.state.epoch}] mae {m['mae']:.4f} log-l1 {m['log_l1']:.4f}")

    score = lambda engine: -engine.state.metrics["mae"]
    best = Checkpoint(
        {"model": model},
        DiskSaver(cfg["out"], require_empty=False),
        n_saved=2,
        score_function=score,
        global_step_transform=global_step_from_engine(trainer),
    )
    evaluator.add_event_handler(Events.COMPLETED, best)
    evaluator.add_event_handler(Events.COMPLETED, EarlyStopping(10, score, trainer))
    trainer.run(train_loader, max_epochs=cfg["epochs"])


if __name__ == "__main__":
    with open(sys.argv[1]) as f:
        config = json.load(f)
    with idist.Parallel(backend="nccl") as parallel:
        parallel.run(run, config)
