# source: https://github.com/Lightning-AI/pytorch-lightning/issues/19695
# mistake: manual optimization under precision="16-mixed" calls loss.backward() instead of manual_backward, so the loss is not scaled and the optimizer step's unscale_ raises.
# severity: error
import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from offline.buffer import TransitionSet


def mlp(sizes, out_act=None):
    layers = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        layers += [nn.Linear(a, b), nn.LayerNorm(b), nn.Mish()]
    layers = layers[:-2]
    if out_act is not None:
        layers.append(out_act)
    return nn.Sequential(*layers)


class OfflineActorCritic(L.LightningModule):
    def __init__(self, obs=17, act=6, hidden=256, gamma=0.99, tau=0.005, alpha=2.5):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.actor = mlp([obs, hidden, hidden, act], nn.Tanh())
        self.critic = mlp([obs + act, hidden, hidden, 1])
        self.target = mlp([obs + act, hidden, hidden, 1])
        self.target.load_state_dict(self.critic.state_dict())
        self.target.requires_grad_(False)
        self.actor_target = mlp([obs, hidden, hidden, act], nn.Tanh())
        self.actor_target.load_state_dict(self.actor.state_dict())
        self.actor_target.requires_grad_(False)

    def q(self, net, s, a):
        return net(torch.cat([s, a], dim=-1)).squeeze(-1)

    def critic_loss(self, s, a, r, s2, done):
        with torch.no_grad():
            backup = r + self.hparams.gamma * (1 - done) * self.q(self.target, s2, self.actor_target(s2)).float()
        return F.mse_loss(self.q(self.critic, s, a).float(), backup)

    def actor_loss(self, s, a):
        pi = self.actor(s)
        q = self.q(self.critic, s, pi).float()
        lam = self.hparams.alpha / q.abs().mean().detach()
        return -lam * q.mean() + F.mse_loss(pi.float(), a)

    def training_step(self, batch, batch_idx):
        s, a, r, s2, done = batch
        opt_actor, opt_critic = self.optimizers()

        self.toggle_optimizer(opt_critic)
        c = self.critic_loss(s, a, r, s2, done)
        opt_critic.zero_grad()
        c.backward()  # <- here
        opt_critic.step()  # <- here
        self.untoggle_optimizer(opt_critic)

        if batch_idx % 2 == 0:
            self.toggle_optimizer(opt_actor)
            p = self.actor_loss(s, a)
            opt_actor.zero_grad()
            p.backward()  # <- here
            opt_actor.step()  # <- here
            self.untoggle_optimizer(opt_actor)
            self.log("actor", p)
        self.log("critic", c, prog_bar=True)

        with torch.no_grad():
            for slow, fast in ((self.target, self.critic), (self.actor_target, self.actor)):
                for t, o in zip(slow.parameters(), fast.parameters()):
                    t.lerp_(o, self.hparams.tau)

    def configure_optimizers(self):
        return (torch.optim.Adam(self.actor.parameters(), lr=3e-4),
                torch.optim.Adam(self.critic.parameters(), lr=3e-4))


if __name__ == "__main__":
    L.seed_everything(0)
    loader = DataLoader(TransitionSet("halfcheetah.npz"), batch_size=1024, shuffle=True, num_workers=4)
    trainer = L.Trainer(accelerator="gpu", devices=1, precision="16-mixed", max_epochs=40)  # <- here
    trainer.fit(OfflineActorCritic(), loader)
