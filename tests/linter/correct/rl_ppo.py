import torch
import torch.nn as nn


class Agent(nn.Module):
    def __init__(self, obs, act):
        super().__init__()
        self.critic = nn.Linear(obs, 1)
        self.actor = nn.Linear(obs, act)

    def evaluate(self, x, action):
        dist = torch.distributions.Categorical(logits=self.actor(x).float())
        return dist.log_prob(action), dist.entropy(), self.critic(x)


def update(agent, optimizer, scaler, rollout, cfg):
    for epoch in range(cfg.update_epochs):
        for mb in rollout.minibatches():
            with torch.autocast("cuda", dtype=torch.float16):
                logprob, entropy, value = agent.evaluate(mb.obs, mb.actions)
                ratio = (logprob - mb.logprobs).exp()
                adv = (mb.advantages - mb.advantages.mean()) / (mb.advantages.std() + 1e-8)
                pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean()
                v_loss = 0.5 * (value.float().squeeze(-1) - mb.returns).pow(2).mean()
                loss = pg_loss - cfg.ent_coef * entropy.mean() + cfg.vf_coef * v_loss
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(agent.parameters(), cfg.max_grad_norm)
            scaler.step(optimizer)
            scaler.update()
