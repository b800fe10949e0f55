# source: https://github.com/NVIDIA/physicsnemo/issues/1737
# mistake: the spectral layer transforms the float16 output of an autocast convolution on a 180x360 grid; half-precision cuFFT takes only powers of two, so it raises (and the contraction would run in complex half)
# severity: error
import torch
import torch.nn as nn
import torch.nn.functional as F

NLAT, NLON = 180, 360


class SpectralMix(nn.Module):
    def __init__(self, ch, modes_lat, modes_lon):
        super().__init__()
        self.m1, self.m2 = modes_lat, modes_lon
        scale = 1 / ch
        self.w = nn.Parameter(scale * torch.randn(ch, ch, modes_lat, modes_lon, 2))

    def forward(self, x):
        b, c, h, w = x.shape
        spec = torch.fft.rfft2(x, norm="ortho")  # <- here
        out = torch.zeros(b, c, h, w // 2 + 1, dtype=torch.cfloat, device=x.device)
        kernel = torch.view_as_complex(self.w)
        out[:, :, : self.m1, : self.m2] = torch.einsum("bixy,ioxy->boxy", spec[:, :, : self.m1, : self.m2], kernel)  # <- here
        return torch.fft.irfft2(out, s=(h, w), norm="ortho")


class Layer(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.inner = nn.Conv2d(ch, ch, 1)
        self.spectral = SpectralMix(ch, 32, 32)
        self.skip = nn.Conv2d(ch, ch, 1)

    def forward(self, x):
        return F.gelu(self.spectral(self.inner(x)) + self.skip(x))  # <- here


class Forecast(nn.Module):
    def __init__(self, variables=20, ch=64, depth=4):
        super().__init__()
        self.encode = nn.Conv2d(variables, ch, 1)
        self.layers = nn.ModuleList(Layer(ch) for _ in range(depth))
        self.decode = nn.Conv2d(ch, variables, 1)

    def forward(self, x):
        h = self.encode(x)
        for layer in self.layers:
            h = h + layer(h)
        return x + self.decode(h)


def latitude_weights(device):
    lat = torch.linspace(-89.5, 89.5, NLAT, device=device)
    w = torch.cos(torch.deg2rad(lat))
    return (w / w.mean()).view(1, 1, NLAT, 1)


def train(loader, epochs=50, device="cuda"):
    net = Forecast().to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=5e-4)
    scaler = torch.amp.GradScaler(device)
    area = latitude_weights(device)
    for epoch in range(epochs):
        for now, nxt in loader:
            assert now.shape[-2:] == (NLAT, NLON)
            now, nxt = now.to(device), nxt.to(device)
            opt.zero_grad(set_to_none=True)
            with torch.autocast(device, dtype=torch.float16):
                guess = net(now)
            loss = (area * (guess.float() - nxt).square()).mean()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        print(epoch, loss.item())
    return net
