# why correct: a step with a huge gradient norm is skipped, but scaler.update() is called in every iteration after unscale_, so the scaler's state stays consistent
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver, TerminateOnNan
from ignite.metrics import RunningAverage
from torch.cuda.amp import GradScaler, autocast


class NormWatch:
    """Running estimate of the gradient norm; tells outliers."""

    def __init__(self, factor=6.0, beta=0.98, warm=200):
        self.factor, self.beta, self.warm = factor, beta, warm
        self.mean, self.n = 0.0, 0

    def is_outlier(self, norm):
        if not torch.isfinite(norm):
            return False
        value = norm.item()
        odd = self.n >= self.warm and value > self.factor * self.mean
        if not odd:
            self.n += 1
            b = min(self.beta, self.n / (self.n + 1))
            self.mean = b * self.mean + (1 - b) * value
        return odd

    def state_dict(self):
        return {"mean": self.mean, "n": self.n}

    def load_state_dict(self, s):
        self.mean, self.n = s["mean"], s["n"]


def make_trainer(net, opt, scaler, watch, device):
    params = [p for p in net.parameters() if p.requires_grad]

    def train_step(engine, batch):
        net.train()
        frames, flow, valid = (x.to(device, non_blocking=True) for x in batch)
        opt.zero_grad(set_to_none=True)
        with autocast():
            preds = net(frames[:, 0], frames[:, 1])
        loss = 0.0
        for i, p in enumerate(preds):
            err = (p.float() - flow).abs().sum(1)
            loss = loss + 0.8 ** (len(preds) - i - 1) * (err * valid).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
        if watch.is_outlier(norm):
            engine.state.skipped = getattr(engine.state, "skipped", 0) + 1
        else:
            scaler.step(opt)
        scaler.update()
        return {"loss": loss.item(), "scale": scaler.get_scale()}

    return Engine(train_step)


def run(net, loader, folder, epochs=50, lr=4e-4, resume=None):
    device = torch.device("cuda")
    net = net.to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=1e-4)
    scaler, watch = GradScaler(), NormWatch()
    trainer = make_trainer(net, opt, scaler, watch, device)
    RunningAverage(output_transform=lambda o: o["loss"]).attach(trainer, "avg")
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan(output_transform=lambda o: o["loss"]))
    parts = {"net": net, "opt": opt, "scaler": scaler, "watch": watch, "trainer": trainer}
    keeper = Checkpoint(parts, DiskSaver(folder, require_empty=False), n_saved=2)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, keeper)
    if resume:
        Checkpoint.load_objects(parts, torch.load(resume, map_location=device))

    @trainer.on(Events.ITERATION_COMPLETED(every=200))
    def show(e):
        print(e.state.iteration, e.state.metrics["avg"], e.state.output["scale"])

    trainer.run(loader, max_epochs=epochs)
