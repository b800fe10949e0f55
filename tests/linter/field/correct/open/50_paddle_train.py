# style of: PaddlePaddle/PaddleClas:ppcls/engine/train/train.py
# torch: none (paddle)
import paddle
import paddle.nn.functional as F


class Engine:
    def __init__(self, config, model, train_loader):
        self.model = model
        self.train_loader = train_loader
        self.amp = "AMP" in config
        self.update_freq = config["Global"].get("update_freq", 1)
        self.lr_sch = paddle.optimizer.lr.CosineAnnealingDecay(
            learning_rate=config["Optimizer"]["lr"], T_max=config["Global"]["epochs"]
        )
        self.optimizer = paddle.optimizer.Momentum(
            learning_rate=self.lr_sch,
            momentum=0.9,
            parameters=model.parameters(),
            grad_clip=paddle.nn.ClipGradByGlobalNorm(clip_norm=5.0),
        )
        if self.amp:
            self.scaler = paddle.amp.GradScaler(
                init_loss_scaling=config["AMP"].get("scale_loss", 1024.0),
                use_dynamic_loss_scaling=config["AMP"].get("use_dynamic_loss_scaling", True),
            )

    def forward(self, batch):
        logits = self.model(batch[0])
        return F.cross_entropy(logits.astype("float32"), batch[1])

    def train_epoch(self, epoch):
        self.model.train()
        for iter_id, batch in enumerate(self.train_loader()):
            if self.amp:
                with paddle.amp.auto_cast(level="O1"):
                    loss = self.forward(batch) / self.update_freq
                scaled = self.scaler.scale(loss)
                scaled.backward()
                if (iter_id + 1) % self.update_freq == 0:
                    # unscales, checks and steps
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                    self.optimizer.clear_grad()
            else:
                loss = self.forward(batch) / self.update_freq
                loss.backward()
                if (iter_id + 1) % self.update_freq == 0:
                    self.optimizer.step()
                    self.optimizer.clear_grad()
            if iter_id % 50 == 0:
                print(epoch, iter_id, float(loss) * self.update_freq, self.optimizer.get_lr())
        self.lr_sch.step()

    def save(self, prefix):
        paddle.save(self.model.state_dict(), prefix + ".pdparams")
        paddle.save(self.optimizer.state_dict(), prefix + ".pdopt")
        if self.amp:
            paddle.save(self.scaler.state_dict(), prefix + ".pdscaler")

    def resume(self, prefix):
        self.model.set_state_dict(paddle.load(prefix + ".pdparams"))
        self.optimizer.set_state_dict(paddle.load(prefix + ".pdopt"))
        if self.amp:
            self.scaler.load_state_dict(paddle.load(prefix + ".pdscaler"))
