"""
# source: https://github.com/HorizonRobotics/alf/pull/1770
# mistake: the actor and the critic group name the same optimizer, so it is stepped twice before the single update(), which raises RuntimeError.
# severity: error
# torch: any
"""
import torch
from torch import nn


class SacAlgorithm:
    def __init__(self, obs_dim, act_dim, amp=True):
        self.actor = nn.Sequential(nn.Linear(obs_dim, 256), nn.ReLU(), nn.Linear(256, act_dim), nn.Tanh()).cuda()
        self.critic = nn.Sequential(nn.Linear(obs_dim + act_dim, 256), nn.ReLU(), nn.Linear(256, 1)).cuda()
        self.shared = torch.optim.Adam(
            [{"params": self.actor.parameters(), "lr": 3e-4}, {"params": self.critic.parameters(), "lr": 1e-3}]
        )
        self.handled = {"actor": self.shared, "critic": self.shared}
        self.amp = amp
        self.grad_scaler = torch.amp.GradScaler("cuda", enabled=amp)

    def losses(self, batch, gamma=0.99):
        obs, act, rew, nxt = batch
        with torch.no_grad():
            target = rew + gamma * self.critic(torch.cat([nxt, self.actor(nxt)], -1)).float().squeeze(-1)
        q = self.critic(torch.cat([obs, act], -1)).squeeze(-1)
        critic_loss = nn.functional.smooth_l1_loss(q.float(), target)
        actor_loss = -self.critic(torch.cat([obs, self.actor(obs)], -1)).float().mean()
        return critic_loss + actor_loss

    def backward_and_update(self, loss):
        for optimizer in self.handled.values():
            optimizer.zero_grad()
        self.grad_scaler.scale(loss).backward()
        self.grad_scaler.step(self.handled["actor"])
        self.grad_scaler.step(self.handled["critic"])  # <- here
        self.grad_scaler.update()

    def train_step(self, batch):
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.amp):
            loss = self.losses(batch)
        self.backward_and_update(loss)
        return loss.detach()


def run(env, replay, iterations):
    alg = SacAlgorithm(env.obs_dim, env.act_dim)
    obs = env.reset()
    for it in range(iterations):
        with torch.no_grad():
            action = alg.actor(obs.cuda()) + 0.1 * torch.randn(env.act_dim, device="cuda")
        obs = replay.collect(env, obs, action)
        if len(replay) > 1000:
            loss = alg.train_step(replay.sample(256))
            if it % 500 == 0:
                print(it, loss.item())
