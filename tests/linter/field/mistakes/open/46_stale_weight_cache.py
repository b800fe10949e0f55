# source: https://github.com/X-GenGroup/Flow-Factory/pull/186
# mistake: one autocast block surrounds all inner updates, so its cache keeps serving the low-precision copies of the weights made before the first optimizer.step().
# severity: error
# torch: any
import torch
from torch import nn


class GRPOTrainer:
    def __init__(self, policy: nn.Module, cfg, device="cuda"):
        self.policy = policy.to(device)
        self.cfg = cfg
        self.device = device
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=cfg.lr)

    def autocast(self):
        return torch.autocast(self.device, dtype=torch.bfloat16)

    @torch.no_grad()
    def rollout(self, prompts):
        self.policy.eval()
        with self.autocast():
            return self.policy.sample(prompts)

    def optimize(self, samples):
        self.policy.train()
        stats = []
        with self.autocast():  # <- here
            for inner in range(self.cfg.num_inner_epochs):
                for mb in samples.split(self.cfg.micro_batch):
                    log_prob = self.policy.log_prob(mb.latents, mb.prompts)
                    ratio = torch.exp(log_prob - mb.old_log_prob)
                    clipped = ratio.clamp(1 - self.cfg.clip, 1 + self.cfg.clip)
                    loss = -torch.min(ratio * mb.advantage, clipped * mb.advantage).mean()
                    self.optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(self.policy.parameters(), self.cfg.max_grad_norm)
                    self.optimizer.step()  # <- here
                    stats.append(loss.detach())
        return torch.stack(stats).mean().item()

    def start(self, prompt_loader, reward_fn):
        for epoch, prompts in zip(range(self.cfg.epochs), prompt_loader):
            samples = self.rollout(prompts)
            samples.set_advantage(reward_fn(samples))
            print(epoch, self.optimize(samples))
