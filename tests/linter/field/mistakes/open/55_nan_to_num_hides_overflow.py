# source: 565353780/td-igl:td_ilg/Optimizer/native_scaler.py@8cb05909b3e53bf0fc4a4b0b6a5bce6113745a5c
# mistake: non-finite values are replaced in the scaled gradients before the scaler looks at them, so it never sees an overflow: a garbage step is taken and the scale is not lowered.
# severity: error
# torch: any
import torch
from torch.nn.utils import clip_grad_norm_


class ScalerWithGradNorm:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cuda")

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, update_grad=True):
        self._scaler.scale(loss).backward()
        parameters = [p for p in parameters if p.grad is not None]

        for p in parameters:
            p.grad = torch.nan_to_num(p.grad, nan=0.0)  # <- here

        norm = None
        if update_grad:
            if clip_grad is not None:
                self._scaler.unscale_(optimizer)
                norm = clip_grad_norm_(parameters, clip_grad)
            self._scaler.step(optimizer)
            self._scaler.update()
        return norm

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state):
        self._scaler.load_state_dict(state)


def train_one_epoch(model, loader, criterion, optimizer, loss_scaler, accum_iter=4, clip=1.0):
    model.train()
    optimizer.zero_grad()
    for i, (points, values) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            pred = model(points.cuda())
            loss = criterion(pred, values.cuda())
        boundary = (i + 1) % accum_iter == 0
        loss_scaler(loss / accum_iter, optimizer, clip, model.parameters(), update_grad=boundary)
        if boundary:
            optimizer.zero_grad()


def main(model, loader, epochs=100):
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = ScalerWithGradNorm()
    for _ in range(epochs):
        train_one_epoch(model, loader, torch.nn.MSELoss(), optimizer, scaler)
