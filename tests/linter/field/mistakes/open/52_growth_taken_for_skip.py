# source: https://github.com/ShiqiYu/OpenGait/issues/147
# mistake: any change of the scale counts as a skipped step, although the scale also changes when it grows after a good step; the schedule then misses one step per growth.
# severity: warning
# torch: any
import torch


class GaitModel(torch.nn.Module):
    def __init__(self, backbone, losses, engine_cfg):
        super().__init__()
        self.backbone = backbone
        self.losses = losses
        self.engine_cfg = engine_cfg
        self.iteration = 0
        self.optimizer = torch.optim.SGD(self.backbone.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [20000, 40000, 50000], gamma=0.1)
        if engine_cfg["enable_float16"]:
            self.scaler = torch.amp.GradScaler("cuda")

    def train_step(self, loss_sum) -> bool:
        self.optimizer.zero_grad()
        if self.engine_cfg["enable_float16"]:
            self.scaler.scale(loss_sum).backward()
            self.scaler.step(self.optimizer)
            scale = self.scaler.get_scale()
            self.scaler.update()
            if scale != self.scaler.get_scale():  # <- here
                print(f"step skipped, the scale went from {scale} to {self.scaler.get_scale()}")
                return False
        else:
            loss_sum.backward()
            self.optimizer.step()
        self.iteration += 1
        self.scheduler.step()
        return True

    @staticmethod
    def run_train(model, loader):
        model.cuda().train()
        for silhouettes, labels in loader:
            with torch.autocast("cuda", dtype=torch.float16, enabled=model.engine_cfg["enable_float16"]):
                feats = model.backbone(silhouettes.cuda())
            loss_sum = model.losses(feats.float(), labels.cuda())
            ok = model.train_step(loss_sum)
            if not ok:
                continue
            if model.iteration % 100 == 0:
                print(model.iteration, loss_sum.item())
            if model.iteration >= model.engine_cfg["total_iter"]:
                break
