# style of: microsoft/DeepSpeedExamples:training/cifar/cifar10_deepspeed.py
# torch: any
import argparse

import deepspeed
import torch
import torch.nn as nn
from deepspeed.accelerator import get_accelerator

from nets import SmallConvNet


def get_ds_config(args):
    return {
        "train_batch_size": 16,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
        },
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {
            "enabled": args.dtype == "fp16",
            "loss_scale": 0,
            "initial_scale_power": 15,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "zero_optimization": {"stage": args.stage},
    }


def main(args, trainset):
    deepspeed.init_distributed()
    net = SmallConvNet()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    # the engine owns the loss scale, the clipping and the schedule
    engine, optimizer, trainloader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=trainset, config=get_ds_config(args)
    )
    device = get_accelerator().device_name(engine.local_rank)
    target_dtype = {"bf16": torch.bfloat16, "fp16": torch.half}.get(args.dtype)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        running_loss = 0.0
        for i, (inputs, labels) in enumerate(trainloader):
            inputs, labels = inputs.to(device), labels.to(device)
            if target_dtype is not None:
                inputs = inputs.to(target_dtype)
            outputs = engine(inputs)
            loss = criterion(outputs, labels)
            engine.backward(loss)
            engine.step()
            running_loss += loss.item()
            if engine.local_rank == 0 and i % args.log_interval == args.log_interval - 1:
                print(f"[{epoch + 1}, {i + 1:5d}] loss: {running_loss / args.log_interval:.3f}")
                running_loss = 0.0
        engine.save_checkpoint(args.save_dir, tag=f"epoch{epoch}")


def add_argument():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=30, type=int)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--log_interval", type=int, default=2000)
    parser.add_argument("--dtype", default="fp16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--stage", default=0, type=int, choices=[0, 1, 2, 3])
    parser.add_argument("--save_dir", default="ckpt")
    return deepspeed.add_config_arguments(parser).parse_args()
