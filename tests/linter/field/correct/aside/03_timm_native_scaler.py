# style of: huggingface/pytorch-image-models:timm/utils/cuda.py
# torch: 1.6+
from contextlib import suppress

import torch


def clip_by_mode(params, value, mode="norm", norm_type=2.0):
    if mode == "norm":
        torch.nn.utils.clip_grad_norm_(params, value, norm_type=norm_type)
    elif mode == "value":
        torch.nn.utils.clip_grad_value_(params, value)
    else:
        raise ValueError(f"unknown clip mode {mode!r}")


class LossScaler:
    state_dict_key = "amp_scaler"

    def __init__(self, device="cuda"):
        try:
            self._scaler = torch.amp.GradScaler(device=device)
        except (AttributeError, TypeError):
            # older releases only know the cuda flavour
            self._scaler = torch.cuda.amp.GradScaler()

    def __call__(
        self,
        loss,
        optimizer,
        clip_grad=None,
        clip_mode="norm",
        parameters=None,
        create_graph=False,
        need_update=True,
    ):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if need_update:
            if clip_grad is not None:
                assert parameters is not None
                self._scaler.unscale_(optimizer)
                clip_by_mode(parameters, clip_grad, mode=clip_mode)
            self._scaler.step(optimizer)
            self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state):
        self._scaler.load_state_dict(state)


def train_step(model, batch, criterion, optimizer, loss_scaler=None, clip_grad=None, amp_autocast=suppress):
    images, labels = batch
    with amp_autocast():
        loss = criterion(model(images), labels)
    optimizer.zero_grad()
    if loss_scaler is not None:
        loss_scaler(loss, optimizer, clip_grad=clip_grad, parameters=model.parameters())
    else:
        loss.backward()
        if clip_grad is not None:
            clip_by_mode(model.parameters(), clip_grad)
        optimizer.step()
    return loss.detach()
