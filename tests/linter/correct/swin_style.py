import torch
from utils import NativeScalerWithGradNormCount, reduce_tensor


def train_one_epoch(
    config, model, criterion, data_loader, optimizer, epoch, mixup_fn, lr_scheduler, loss_scaler
):
    model.train()
    optimizer.zero_grad()
    num_steps = len(data_loader)
    for idx, (samples, targets) in enumerate(data_loader):
        if mixup_fn is not None:
            samples, targets = mixup_fn(samples, targets)
        with torch.amp.autocast("cuda", enabled=config.AMP_ENABLE):
            outputs = model(samples)
        loss = criterion(outputs, targets)
        loss = loss / config.TRAIN.ACCUMULATION_STEPS
        is_second_order = hasattr(optimizer, "is_second_order") and optimizer.is_second_order
        update = (idx + 1) % config.TRAIN.ACCUMULATION_STEPS == 0
        grad_norm = loss_scaler(
            loss,
            optimizer,
            clip_grad=config.TRAIN.CLIP_GRAD,
            parameters=model.parameters(),
            create_graph=is_second_order,
            update_grad=update,
        )
        if update:
            optimizer.zero_grad()
            lr_scheduler.step_update((epoch * num_steps + idx) // config.TRAIN.ACCUMULATION_STEPS)
        loss_scale_value = loss_scaler.state_dict()["scale"]
        print(grad_norm, loss_scale_value)


@torch.no_grad()
def validate(config, data_loader, model):
    criterion = torch.nn.CrossEntropyLoss()
    model.eval()
    for idx, (images, target) in enumerate(data_loader):
        with torch.amp.autocast("cuda", enabled=config.AMP_ENABLE):
            output = model(images)
        loss = criterion(output.float(), target)
        print(reduce_tensor(loss))


def main():
    return NativeScalerWithGradNormCount()
