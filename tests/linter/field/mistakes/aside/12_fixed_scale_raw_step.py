# source: nerfstudio-project/nerfacc:examples/train_ngp_nerf_prop.py@00d156cabe1cce9482801a606413c4a2e006b642
# mistake: the loss is multiplied by the scaler's 1024 but the optimizer steps directly, so it is fed gradients 1024 times too large and neither unscaling nor the inf check ever happens.
# severity: error
# torch: any
# (also discussed at nerfstudio-project/nerfacc#307)
import argparse

import torch
import torch.nn.functional as F

from fields import HashField, render_rays
from rays import RaySampler

parser = argparse.ArgumentParser()
parser.add_argument("--scene", default="lego")
parser.add_argument("--max_steps", type=int, default=20000)
args = parser.parse_args()

device = "cuda:0"
torch.manual_seed(42)

field = HashField(n_levels=16, log2_size=19).to(device)
optimizer = torch.optim.Adam(field.parameters(), lr=1e-2, eps=1e-15, weight_decay=1e-6)
grad_scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
sampler = RaySampler(args.scene, num_rays=4096, device=device)

for step in range(args.max_steps + 1):
    field.train()
    rays, pixels, background = sampler.next()

    with torch.autocast("cuda", dtype=torch.float16):
        rgb, acc, depth = render_rays(field, rays, background)
        loss = F.smooth_l1_loss(rgb.float(), pixels)

    optimizer.zero_grad()
    grad_scaler.scale(loss).backward()
    optimizer.step()  # <- here

    if step % 1000 == 0:
        with torch.no_grad():
            psnr = -10.0 * torch.log10(F.mse_loss(rgb.float(), pixels))
        print(f"step={step} loss={loss.item():.5f} psnr={psnr.item():.2f} rays={len(pixels)}")

torch.save(field.state_dict(), f"{args.scene}.pt")
