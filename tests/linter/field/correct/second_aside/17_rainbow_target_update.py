"""
# style of: Kaixhin/Rainbow:agent.py
# correct: learn() returns whether the step was taken; the soft target update happens only then; priorities are computed from the unscaled, detached losses.
# torch: 1.10+
"""
import copy

import torch
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_


class DQN(nn.Module):
    def __init__(self, actions, atoms):
        super().__init__()
        self.actions, self.atoms = actions, atoms
        self.convs = nn.Sequential(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Flatten())
        self.value = nn.Sequential(nn.LazyLinear(512), nn.ReLU(), nn.Linear(512, atoms))
        self.advantage = nn.Sequential(nn.LazyLinear(512), nn.ReLU(), nn.Linear(512, actions * atoms))

    def forward(self, x):
        h = self.convs(x)
        v, a = self.value(h).view(-1, 1, self.atoms), self.advantage(h).view(-1, self.actions, self.atoms)
        return (v + a - a.mean(1, keepdim=True)).float()


class Agent:
    def __init__(self, args, actions):
        self.device = args.device
        self.support = torch.linspace(args.v_min, args.v_max, args.atoms, device=args.device)
        self.discount, self.tau, self.norm_clip = args.discount, args.tau, args.norm_clip
        self.online_net = DQN(actions, args.atoms).to(args.device).train()
        with torch.no_grad():
            self.online_net(torch.zeros(1, 4, 84, 84, device=args.device))
        self.target_net = copy.deepcopy(self.online_net).requires_grad_(False)
        self.optimiser = optim.Adam(self.online_net.parameters(), lr=args.learning_rate, eps=1.5e-4)
        self.amp = args.amp
        self.scaler = torch.cuda.amp.GradScaler(enabled=args.amp)

    def _ctx(self):
        return torch.autocast("cuda", dtype=torch.float16, enabled=self.amp)

    @torch.no_grad()
    def act(self, state):
        with self._ctx():
            probs = self.online_net(state.unsqueeze(0)).softmax(-1)
        return (probs * self.support).sum(2).argmax(1).item()

    @torch.no_grad()
    def _targets(self, rewards, next_states, alive):
        with self._ctx():
            best = (self.online_net(next_states).softmax(-1) * self.support).sum(2).argmax(1)
            probs = self.target_net(next_states).softmax(-1)
        probs = probs[torch.arange(len(best)), best]
        tz = (rewards[:, None] + alive[:, None] * self.discount * self.support).clamp(self.support[0], self.support[-1])
        b = (tz - self.support[0]) / (self.support[1] - self.support[0])
        low, high = b.floor().long(), b.ceil().long()
        m = torch.zeros_like(probs)
        m.scatter_add_(1, low, probs * (high.float() - b + (low == high).float()))
        m.scatter_add_(1, high, probs * (b - low.float()))
        return m

    def learn(self, mem):
        idxs, states, actions, rewards, next_states, alive, weights = mem.sample()
        m = self._targets(rewards, next_states, alive)
        with self._ctx():
            log_ps = self.online_net(states).log_softmax(-1)[torch.arange(len(actions)), actions]
        losses = -(m * log_ps).sum(1)

        self.optimiser.zero_grad()
        self.scaler.scale((weights * losses).mean()).backward()
        self.scaler.unscale_(self.optimiser)
        clip_grad_norm_(self.online_net.parameters(), self.norm_clip)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimiser)
        self.scaler.update()
        stepped = self.scaler.get_scale() >= scale
        if stepped:
            self.update_target_net()
        mem.update_priorities(idxs, losses.detach().cpu().numpy())
        return stepped

    @torch.no_grad()
    def update_target_net(self):
        for t, p in zip(self.target_net.parameters(), self.online_net.parameters()):
            t.lerp_(p, self.tau)
