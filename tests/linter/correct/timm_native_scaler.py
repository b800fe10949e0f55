import torch


class NativeScaler:
    state_dict_key = "amp_scaler"

    def __init__(self, device="cuda"):
        self._scaler = torch.amp.GradScaler(device)

    def __call__(
        self, loss, optimizer, clip_grad=None, parameters=None, create_graph=False, need_update=True
    ):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if need_update:
            if clip_grad is not None:
                assert parameters is not None
                self._scaler.unscale_(optimizer)  # in-place
                torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
            self._scaler.step(optimizer)
            self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict):
        self._scaler.load_state_dict(state_dict)


def train(model, loader, optimizer, criterion, accum):
    loss_scaler = NativeScaler()
    optimizer.zero_grad()
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y) / accum
        update = (i + 1) % accum == 0
        loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters(), need_update=update)
        if update:
            optimizer.zero_grad()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": loss_scaler.state_dict()},
        "x.pt",
    )
