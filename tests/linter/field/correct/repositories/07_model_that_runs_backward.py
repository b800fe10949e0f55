# source: the training loop of DINOv2, re-expressed: a method of the model scales the loss and runs backward
import torch


def do_train(model, optimizer, loader, clip):
    fp16_scaler = model.fp16_scaler
    for data in loader:
        optimizer.zero_grad(set_to_none=True)
        losses = model.forward_backward(data, temperature=0.07)
        if fp16_scaler is not None:
            if clip:
                fp16_scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            fp16_scaler.step(optimizer)
            fp16_scaler.update()
        else:
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        model.update_teacher(0.999)
        print({name: value.item() for name, value in losses.items()})
