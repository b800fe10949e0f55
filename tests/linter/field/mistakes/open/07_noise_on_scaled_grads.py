# source: https://github.com/rwth-i6/returnn/pull/1595
# mistake: Gaussian gradient noise of a fixed standard deviation is added while the gradients still carry the loss scale, so after unscaling the noise is practically zero.
# severity: error
# torch: any
import torch


class Updater:
    def __init__(self, config: dict, network: torch.nn.Module):
        self.network = network
        self.noise = float(config.get("gradient_noise", 0.0))
        self.clip_global_norm = config.get("gradient_clip_global_norm")
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=config["learning_rate"])

    def add_noise(self):
        with torch.no_grad():
            for param in self.network.parameters():
                if param.grad is not None:
                    param.grad.add_(torch.randn_like(param.grad) * self.noise)

    def step(self, scaler: torch.amp.GradScaler):
        if self.noise:
            self.add_noise()  # <- here
        scaler.unscale_(self.optimizer)
        if self.clip_global_norm:
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.clip_global_norm)
        scaler.step(self.optimizer)
        scaler.update()


class Engine:
    def __init__(self, config, network, dataset):
        self.config = config
        self.dataset = dataset
        self.network = network.cuda()
        self.updater = Updater(config, self.network)
        self.scaler = torch.amp.GradScaler("cuda")

    def train_epoch(self):
        self.network.train()
        for extern_data, classes in self.dataset:
            self.updater.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                logits = self.network(extern_data.cuda())
                loss = torch.nn.functional.cross_entropy(logits, classes.cuda())
            self.scaler.scale(loss).backward()
            self.updater.step(self.scaler)

    def train(self):
        for _ in range(self.config["num_epochs"]):
            self.train_epoch()
