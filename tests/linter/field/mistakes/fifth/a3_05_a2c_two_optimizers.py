# source: https://github.com/huggingface/accelerate/issues/439
# mistake: the scaler is updated between the steps of two optimizers whose gradients were made with the same scale, so the second may be unscaled with another scale than its gradients carry
# severity: error
import gymnasium as gym
import numpy as np
import torch
from torch import nn

GAMMA, HORIZON, ENVS = 0.99, 32, 16
device = torch.device("cuda")


def mlp(n_in, n_out):
    return nn.Sequential(nn.Linear(n_in, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, n_out))


def collect(envs, obs, actor):
    store = {"obs": [], "act": [], "rew": [], "done": []}
    for _ in range(HORIZON):
        x = torch.as_tensor(obs, dtype=torch.float32, device=device)
        with torch.no_grad():
            action = torch.distributions.Categorical(logits=actor(x)).sample()
        nxt, reward, term, trunc, _ = envs.step(action.cpu().numpy())
        store["obs"].append(x)
        store["act"].append(action)
        store["rew"].append(torch.as_tensor(reward, dtype=torch.float32, device=device))
        store["done"].append(torch.as_tensor(np.logical_or(term, trunc), dtype=torch.float32, device=device))
        obs = nxt
    return obs, {k: torch.stack(v) for k, v in store.items()}


def discounted(rewards, dones, bootstrap):
    out, running = torch.zeros_like(rewards), bootstrap
    for t in reversed(range(rewards.shape[0])):
        running = rewards[t] + GAMMA * running * (1 - dones[t])
        out[t] = running
    return out


envs = gym.make_vec("LunarLander-v2", num_envs=ENVS)
obs_dim, n_act = envs.single_observation_space.shape[0], envs.single_action_space.n
actor, critic = mlp(obs_dim, n_act).to(device), mlp(obs_dim, 1).to(device)
actor_opt = torch.optim.Adam(actor.parameters(), lr=3e-4)
critic_opt = torch.optim.Adam(critic.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")

obs, _ = envs.reset(seed=0)
for iteration in range(20_000):
    obs, batch = collect(envs, obs, actor)
    with torch.no_grad():
        last = critic(torch.as_tensor(obs, dtype=torch.float32, device=device)).squeeze(-1)
    returns = discounted(batch["rew"], batch["done"], last)

    with torch.autocast("cuda", dtype=torch.float16):
        logits = actor(batch["obs"]).float()
        values = critic(batch["obs"]).squeeze(-1).float()
        dist = torch.distributions.Categorical(logits=logits)
        advantage = (returns - values).detach()
        actor_loss = -(dist.log_prob(batch["act"]) * advantage).mean() - 0.01 * dist.entropy().mean()
        critic_loss = nn.functional.mse_loss(values, returns)

    actor_opt.zero_grad(set_to_none=True)
    critic_opt.zero_grad(set_to_none=True)
    scaler.scale(actor_loss).backward()
    scaler.scale(critic_loss).backward()

    scaler.step(actor_opt)
    scaler.update()  # <- here
    scaler.step(critic_opt)  # <- here
    scaler.update()  # <- here

    if iteration % 100 == 0:
        print(iteration, actor_loss.item(), critic_loss.item(), batch["rew"].sum(0).mean().item())
