# source: Microtreei/TSD-SR issue #11
# mistake: the trainable adapter weights are cast to float16 together with the frozen backbone, so unscaling raises "Attempting to unscale FP16 gradients"
# severity: error
import math

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from omegaconf import OmegaConf
from torch import nn
from tqdm import tqdm

from restore.backbone import load_backbone
from restore.pairs import paired_loader


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear, rank: int, alpha: float):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.gain = alpha / rank
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * self.gain


def inject(module, names, rank, alpha):
    for child_name, child in list(module.named_children()):
        if isinstance(child, nn.Linear) and child_name in names:
            setattr(module, child_name, LowRank(child, rank, alpha))
        else:
            inject(child, names, rank, alpha)


def prepare_model(cfg, device):
    net = load_backbone(cfg.backbone)
    net.requires_grad_(False)
    inject(net, set(cfg.targets), cfg.rank, cfg.alpha)
    net.to(device, dtype=torch.float16)  # <- here
    return net


def main(path):
    cfg = OmegaConf.load(path)
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=cfg.accum)
    net = prepare_model(cfg.model, accelerator.device)  # <- here
    trainable = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=cfg.lr, weight_decay=1e-2)  # <- here
    loader = paired_loader(cfg.data)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)

    step = 0
    bar = tqdm(total=cfg.steps, disable=not accelerator.is_local_main_process)
    while step < cfg.steps:
        for low, high in loader:
            with accelerator.accumulate(net):
                with accelerator.autocast():
                    restored = net(low)
                loss = F.l1_loss(restored.float(), high.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trainable, cfg.max_norm)  # <- here
                optimizer.step()  # <- here
                optimizer.zero_grad(set_to_none=True)
            if accelerator.sync_gradients:
                step += 1
                bar.update()
                bar.set_postfix(loss=f"{loss.item():.4f}")
            if step >= cfg.steps:
                break

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        weights = {n: p.detach().cpu() for n, p in accelerator.unwrap_model(net).named_parameters() if p.requires_grad}
        torch.save(weights, cfg.out)


if __name__ == "__main__":
    main("adapter.yaml")
