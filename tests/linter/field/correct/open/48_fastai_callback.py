# style of: fastai/fastai:fastai/callback/fp16.py
# torch: 1.6+
import torch
from torch.cuda.amp import GradScaler, autocast


class CancelStep(Exception):
    pass


class Callback:
    learn = None

    def __call__(self, event):
        getattr(self, event, lambda: None)()


class MixedPrecision(Callback):
    """Runs the forward and the loss in half precision and scales the gradients."""

    def __init__(self, **kwargs):
        self.kwargs = kwargs

    def before_fit(self):
        self.autocast = autocast()
        self.scaler = GradScaler(**self.kwargs)
        self.skips = 0

    def before_batch(self):
        self.autocast.__enter__()

    def after_loss(self):
        self.autocast.__exit__(None, None, None)

    def before_backward(self):
        self.learn.loss_grad = self.scaler.scale(self.learn.loss_grad)

    def before_step(self):
        # unscale now, so that the callbacks that run after this one see true gradients
        self.scaler.unscale_(self.learn.opt)

    def do_step(self):
        old = self.scaler.get_scale()
        self.scaler.step(self.learn.opt)
        self.scaler.update()
        if self.scaler.get_scale() < old:
            self.skips += 1
            raise CancelStep


class GradientClip(Callback):
    def __init__(self, max_norm=1.0):
        self.max_norm = max_norm

    def before_step(self):
        torch.nn.utils.clip_grad_norm_(self.learn.model.parameters(), self.max_norm)


class Learner:
    def __init__(self, model, loss_func, opt, cbs, sched=None):
        self.model, self.loss_func, self.opt, self.cbs, self.sched = model, loss_func, opt, cbs, sched
        for cb in cbs:
            cb.learn = self

    def __call__(self, event):
        for cb in self.cbs:
            cb(event)

    def one_batch(self, xb, yb):
        self("before_batch")
        self.pred = self.model(xb)
        self.loss_grad = self.loss_func(self.pred, yb)
        self.loss = self.loss_grad.detach()
        self("after_loss")
        self("before_backward")
        self.loss_grad.backward()
        self("before_step")
        try:
            self("do_step")
            if self.sched is not None:
                self.sched.step()
        except CancelStep:
            pass
        self.opt.zero_grad()

    def fit(self, epochs, dl):
        self.model.train()
        self("before_fit")
        for _ in range(epochs):
            for xb, yb in dl:
                self.one_batch(xb.cuda(), yb.cuda())


def make_learner(model, loss_func, opt):
    # order matters: unscale, then clip
    return Learner(model, loss_func, opt, [MixedPrecision(init_scale=2.0**14), GradientClip(1.0)])
