import torch
import torch.nn.functional as F


class SAC:
    def __init__(self, actor, critic, target, cfg):
        self.actor, self.critic, self.target = actor, critic, target
        self.actor_optimizer = torch.optim.Adam(actor.parameters(), lr=cfg.lr)
        self.critic_optimizer = torch.optim.Adam(critic.parameters(), lr=cfg.lr)
        self.scaler = torch.amp.GradScaler("cuda")

    def update_critic(self, obs, action, reward, next_obs):
        with torch.autocast("cuda", dtype=torch.float16):
            with torch.no_grad():
                target = reward + 0.99 * self.target(next_obs, self.actor(next_obs))
            loss = F.mse_loss(self.critic(obs, action), target)
        self.critic_optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.critic_optimizer)

    def update_actor(self, obs):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = -self.critic(obs, self.actor(obs)).mean()
        self.actor_optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.actor_optimizer)

    def update(self, batch):
        self.update_critic(*batch)
        self.update_actor(batch[0])
        self.scaler.update()
