"""
# style of: pytorch/ignite:examples/references/classification/imagenet/main.py
# correct: create_supervised_trainer with amp_mode="amp" is handed the scaler, does scale, step and update itself, and the checkpoint handler keeps the scaler among to_save.
# torch: 1.10+ (ignite 0.4.8+)
"""
import argparse
from pathlib import Path

import torch
from ignite.contrib.handlers import ProgressBar
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, TerminateOnNan, global_step_from_engine
from ignite.metrics import Accuracy, Loss, RunningAverage
from torch import nn, optim

from pets import get_loaders
from small_resnet import resnet20


def main(args):
    device = torch.device("cuda")
    train_loader, val_loader = get_loaders(args.batch_size)
    model = resnet20(num_classes=37).to(device)
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    criterion = nn.CrossEntropyLoss().to(device)
    lr_scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.2)
    scaler = torch.cuda.amp.GradScaler()

    trainer = create_supervised_trainer(
        model,
        optimizer,
        criterion,
        device=device,
        non_blocking=True,
        amp_mode="amp",
        scaler=scaler,
        gradient_accumulation_steps=args.accumulation,
    )
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: lr_scheduler.step())
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    RunningAverage(output_transform=lambda x: x).attach(trainer, "loss")
    ProgressBar().attach(trainer, ["loss"])

    evaluator = create_supervised_evaluator(
        model,
        metrics={"accuracy": Accuracy(), "nll": Loss(criterion)},
        device=device,
        amp_mode="amp",
    )

    @trainer.on(Events.EPOCH_COMPLETED(every=1))
    def validate(engine):
        metrics = evaluator.run(val_loader).metrics
        print(f"epoch {engine.state.epoch}: {metrics} scale {scaler.get_scale():.0f}")

    to_save = {
        "trainer": trainer,
        "model": model,
        "optimizer": optimizer,
        "lr_scheduler": lr_scheduler,
        "scaler": scaler,
    }
    handler = Checkpoint(
        to_save, DiskSaver(args.output, require_empty=False), n_saved=2, global_step_transform=global_step_from_engine(trainer)
    )
    trainer.add_event_handler(Events.EPOCH_COMPLETED, handler)
    if args.resume:
        Checkpoint.load_objects(to_load=to_save, checkpoint=torch.load(args.resume, map_location="cpu"))
    trainer.run(train_loader, max_epochs=args.epochs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--resume", default="")
    parser.add_argument("--output", type=Path, default=Path("runs"))
    main(parser.parse_args())
