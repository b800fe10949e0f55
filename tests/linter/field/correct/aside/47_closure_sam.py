# style of: mosaicml/composer:composer/trainer/_scaler.py
# torch: 2.3+
import torch
from torch.amp.grad_scaler import GradScaler, OptState


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation: the closure is evaluated twice per step."""

    def __init__(self, base_optimizer, rho=0.05):
        self.base_optimizer = base_optimizer
        super().__init__(base_optimizer.param_groups, {"rho": rho})
        self.param_groups = base_optimizer.param_groups

    def _params(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        if loss is None:  # overflow in the first pass
            return None
        params = self._params()
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        rho = self.param_groups[0]["rho"]
        moves = [p.grad * (rho / (norm + 1e-12)) for p in params]
        torch._foreach_add_(params, moves)
        with torch.enable_grad():
            second = closure()
        torch._foreach_sub_(params, moves)
        if second is not None:
            self.base_optimizer.step()
        return loss


class ClosureGradScaler(GradScaler):
    """The stock scaler refuses closures; this one hands the optimizer a closure that unscales."""

    def step(self, optimizer, *args, **kwargs):
        closure = kwargs.pop("closure")
        if not self._enabled:
            return optimizer.step(closure=closure)

        def amp_closure():
            state = self._per_optimizer_states[id(optimizer)]
            state["stage"] = OptState.READY
            optimizer.zero_grad(set_to_none=True)
            loss = closure()
            self.unscale_(optimizer)
            overflow = sum(v.item() for v in state["found_inf_per_device"].values())
            return None if overflow else loss

        return optimizer.step(closure=amp_closure)


def fit(model, loader, criterion, device="cuda"):
    optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    scaler = ClosureGradScaler(device)
    for x, y in loader:
        x, y = x.to(device), y.to(device)

        def closure():
            with torch.autocast(device, dtype=torch.float16):
                loss = criterion(model(x), y)
            scaler.scale(loss).backward()
            return loss

        scaler.step(optimizer, closure=closure)
        scaler.update()
