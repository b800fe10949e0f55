# source: https://github.com/pytorch/pytorch/pull/71169
# mistake: autocast is put around backward() only; backward just reverses the casts of the forward, which ran in float32, so there is no mixed precision.
# severity: warning
# torch: any
# %% notebook: tabular autoencoder
import torch
import torch.nn as nn

device = "cuda"
epochs = 40

# %%
autoencoder = nn.Sequential(
    nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 784)
).to(device)
optimizer = torch.optim.Adam(autoencoder.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device)
mse = nn.MSELoss()

# %%
images = torch.rand(60_000, 784)
loader = torch.utils.data.DataLoader(images, batch_size=512, shuffle=True, pin_memory=True)

# %%
history = []
for epoch in range(epochs):
    autoencoder.train()
    running = 0.0
    for batch in loader:
        batch = batch.to(device, non_blocking=True)
        optimizer.zero_grad()
        reconstruction = autoencoder(batch)
        loss = mse(reconstruction, batch)
        with torch.autocast(device_type=device, dtype=torch.float16):  # <- here
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        running += loss.item()
    history.append(running / len(loader))
    print(f"epoch {epoch + 1:3d} mse {history[-1]:.5f}")

# %%
torch.save(autoencoder.state_dict(), "autoencoder.pt")
