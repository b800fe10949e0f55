# source: https://github.com/Lightning-AI/pytorch-lightning/issues/9599
# mistake: clipping runs before unscale_, the wrong way round, so the clip sees scaled gradients and the unscaled result is far smaller than the limit.
# severity: error
# torch: any
import torch


class MixedPrecisionStepper:
    """Calls backward, gradient clipping and the optimizer in one place."""

    def __init__(self, optimizer, clip_val=0.0, device="cuda"):
        self.optimizer = optimizer
        self.clip_val = clip_val
        self.scaler = torch.amp.GradScaler(device)

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def clip_gradients(self, params):
        if self.clip_val > 0:
            torch.nn.utils.clip_grad_norm_(params, self.clip_val)

    def optimizer_step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def run_epoch(model, loader, stepper, device):
    model.train()
    for x, y in loader:
        with torch.autocast(device, dtype=torch.float16):
            loss = model.training_loss(x.to(device), y.to(device))
        stepper.backward(loss)
        stepper.clip_gradients(model.parameters())  # <- here
        stepper.scaler.unscale_(stepper.optimizer)
        stepper.optimizer_step()


def main():
    from asr_models import ConformerCTC, make_loader

    model = ConformerCTC(vocab=500).cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    stepper = MixedPrecisionStepper(opt, clip_val=0.5)
    for _ in range(30):
        run_epoch(model, make_loader("train"), stepper, "cuda")


if __name__ == "__main__":
    main()
