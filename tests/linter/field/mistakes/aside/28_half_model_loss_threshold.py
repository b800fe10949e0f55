# source: https://github.com/sanghyun-son/EDSR-PyTorch/issues/36
# mistake: the model itself is trained in half precision with Adam, and a check of the loss value stands where loss scaling and float32 weights belong; updates vanish or turn to NaN.
# severity: error
# torch: any
import torch
import torch.optim as optim
from tqdm import tqdm


class SRTrainer:
    def __init__(self, args, loader, my_model, my_loss):
        self.args = args
        self.loader = loader
        self.model = my_model.to("cuda")
        if args.precision == "half":
            self.model.half()  # <- here
        self.loss = my_loss
        self.optimizer = optim.Adam(self.model.parameters(), lr=args.lr, betas=(0.9, 0.999), eps=1e-8)
        self.error_last = 1e8

    def prepare(self, *tensors):
        def _prepare(t):
            if self.args.precision == "half":
                t = t.half()
            return t.to("cuda")

        return [_prepare(t) for t in tensors]

    def train(self):
        self.model.train()
        losses = []
        for batch, (lr, hr, _) in enumerate(tqdm(self.loader)):
            lr, hr = self.prepare(lr, hr)
            self.optimizer.zero_grad()
            sr = self.model(lr)
            loss = self.loss(sr, hr)
            if loss.item() < self.args.skip_threshold * self.error_last:
                loss.backward()
                self.optimizer.step()
                losses.append(loss.item())
            else:
                print(f"Skip this batch {batch + 1}! (Loss: {loss.item()})")
        self.error_last = sum(losses) / max(len(losses), 1)

    @torch.no_grad()
    def test(self, test_loader, psnr):
        self.model.eval()
        scores = []
        for lr, hr, _ in test_loader:
            lr, hr = self.prepare(lr, hr)
            scores.append(psnr(self.model(lr).float(), hr.float()))
        return sum(scores) / len(scores)
