# why correct: the input gradients are made from a scaled output, divided by the same scale, and only then squared; the penalty is scaled again for its backward
import torch
import torch.nn.functional as F


def r1(scaler, score, images):
    scaled = torch.autograd.grad(outputs=scaler.scale(score.float().sum()), inputs=images, create_graph=True)[0]
    slope = scaled.float() / scaler.get_scale()
    return slope.square().sum(dim=(1, 2, 3)).mean()


class Trainer:
    def __init__(self, gen, dis, zdim=512, gamma=10.0, every=16):
        self.gen, self.dis, self.zdim = gen.cuda(), dis.cuda(), zdim
        self.gamma, self.every = gamma, every
        ratio = every / (every + 1)
        self.og = torch.optim.Adam(gen.parameters(), lr=2e-3, betas=(0.0, 0.99))
        self.od = torch.optim.Adam(dis.parameters(), lr=2e-3 * ratio, betas=(0.0, 0.99 ** ratio))
        self.sg = torch.amp.GradScaler("cuda")
        self.sd = torch.amp.GradScaler("cuda")
        self.n = 0

    def fakes(self, n):
        return self.gen(torch.randn(n, self.zdim, device="cuda"))

    def _finish(self, scaler, opt, loss):
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()

    def dis_step(self, real):
        with torch.autocast("cuda", dtype=torch.float16):
            with torch.no_grad():
                fake = self.fakes(real.shape[0])
            loss = F.softplus(self.dis(fake).float()).mean() + F.softplus(-self.dis(real).float()).mean()
        self._finish(self.sd, self.od, loss)
        return loss.item()

    def lazy_reg(self, real):
        real = real.detach().requires_grad_(True)
        with torch.autocast("cuda", dtype=torch.float16):
            score = self.dis(real)
        penalty = r1(self.sd, score, real)
        self._finish(self.sd, self.od, penalty * (self.gamma / 2) * self.every)
        return penalty.item()

    def gen_step(self, n):
        self.dis.requires_grad_(False)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.softplus(-self.dis(self.fakes(n)).float()).mean()
        self._finish(self.sg, self.og, loss)
        self.dis.requires_grad_(True)
        return loss.item()

    def step(self, real):
        stats = {"d": self.dis_step(real)}
        if self.n % self.every == 0:
            stats["r1"] = self.lazy_reg(real)
        stats["g"] = self.gen_step(real.shape[0])
        self.n += 1
        return stats

    def save(self, path):
        names = ("gen", "dis", "og", "od", "sg", "sd")
        torch.save({"n": self.n, **{k: getattr(self, k).state_dict() for k in names}}, path)

    def load(self, path):
        sd = torch.load(path, map_location="cuda", weights_only=True)
        self.n = sd.pop("n")
        for k, v in sd.items():
            getattr(self, k).load_state_dict(v)
