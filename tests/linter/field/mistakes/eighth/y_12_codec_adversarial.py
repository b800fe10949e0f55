# source: https://github.com/galilai-group/stable-pretraining/pull/333
# mistake: with one scaler for two optimizers, update() runs between the two steps, so the second optimizer's gradients (scaled with the old factor) are unscaled with a possibly changed one.
# severity: warning
import torch
import torch.nn.functional as F
import yaml
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader

from codec.data import Waves
from codec.nets import Coder, PatchJudge


class CodecTraining:
    def __init__(self, config):
        self.cfg = config
        self.dev = torch.device("cuda")
        self.coder = Coder(**config["coder"]).to(self.dev)
        self.prior = torch.nn.GRU(config["coder"]["dim"], config["coder"]["dim"], batch_first=True).to(self.dev)
        self.opt_coder = torch.optim.AdamW(self.coder.parameters(), lr=config["lr"], betas=(0.8, 0.99))
        self.opt_prior = torch.optim.AdamW(self.prior.parameters(), lr=config["lr_prior"])
        self.scaler = GradScaler("cuda")
        self.step = 0

    def losses(self, wave):
        with autocast("cuda"):
            code, rec = self.coder(wave)
            ahead, _ = self.prior(code[:, :-1].detach())
        l_rec = F.l1_loss(rec.float(), wave) + self.cfg["commit"] * code.float().pow(2).mean()
        l_prior = F.mse_loss(ahead.float(), code[:, 1:].detach().float())
        return l_rec, l_prior

    def batch(self, wave):
        wave = wave.to(self.dev)
        self.opt_coder.zero_grad()
        self.opt_prior.zero_grad()
        l_rec, l_prior = self.losses(wave)
        self.scaler.scale(l_rec).backward()
        self.scaler.scale(l_prior).backward()

        self.scaler.unscale_(self.opt_coder)
        torch.nn.utils.clip_grad_norm_(self.coder.parameters(), 1.0)
        self.scaler.step(self.opt_coder)
        self.scaler.update()  # <- here

        self.scaler.step(self.opt_prior)  # <- here
        self.scaler.update()  # <- here
        self.step += 1
        return {"rec": l_rec.item(), "prior": l_prior.item()}

    def state(self):
        return {
            "coder": self.coder.state_dict(), "prior": self.prior.state_dict(),
            "opt_coder": self.opt_coder.state_dict(), "opt_prior": self.opt_prior.state_dict(),
            "scaler": self.scaler.state_dict(), "step": self.step,
        }

    def load(self, state):
        for key in ("coder", "prior", "opt_coder", "opt_prior", "scaler"):
            getattr(self, key).load_state_dict(state[key])
        self.step = state["step"]

    def run(self):
        loader = DataLoader(Waves(self.cfg["files"], self.cfg["segment"]), self.cfg["batch"],
                            shuffle=True, num_workers=8, drop_last=True)
        self.coder.train()
        self.prior.train()
        while self.step < self.cfg["steps"]:
            for wave in loader:
                logs = self.batch(wave)
                if self.step % 100 == 0:
                    print(self.step, {k: round(v, 4) for k, v in logs.items()})
                if self.step % 5000 == 0:
                    torch.save(self.state(), f"{self.cfg['out']}/{self.step}.pt")
                if self.step >= self.cfg["steps"]:
                    break


if __name__ == "__main__":
    with open("codec.yaml") as handle:
        CodecTraining(yaml.safe_load(handle)).run()
