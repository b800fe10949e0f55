# why correct: apex gets num_losses=2 and a loss_id per backward, micro-batches before the last delay unscaling, and both optimizers step after the last one only.
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp
from tensorboardX import SummaryWriter

from voiceconv.data import SpeakerPairs
from voiceconv.nets import ContentEncoder, SpeakerDecoder, SpeakerGuess

DEVICE = torch.device("cuda:0")


def confusion(logits):
    return -logits.float().log_softmax(-1).mean()


class Converter(nn.Module):
    def __init__(self, mels, speakers):
        super(Converter, self).__init__()
        self.enc = ContentEncoder(mels)
        self.dec = SpeakerDecoder(mels, speakers)

    def forward(self, mel, speaker):
        content = self.enc(mel)
        return content, self.dec(content, speaker)


def train(root, steps=100000, micro=4, batch=8, logdir="runs/vc"):
    random.seed(0)
    torch.manual_seed(0)
    data = SpeakerPairs(root)
    conv = Converter(data.mels, data.speakers).to(DEVICE)
    guess = SpeakerGuess(data.speakers).to(DEVICE)
    opt_c = torch.optim.Adam(conv.parameters(), lr=1e-4, betas=(0.9, 0.98))
    opt_g = torch.optim.Adam(guess.parameters(), lr=1e-4)
    [conv, guess], [opt_c, opt_g] = amp.initialize([conv, guess], [opt_c, opt_g], opt_level="O1", num_losses=2)
    writer = SummaryWriter(logdir)

    for step in range(1, steps + 1):
        conv.train()
        guess.train()
        opt_c.zero_grad()
        opt_g.zero_grad()
        sums = [0.0, 0.0]
        for m in range(micro):
            last = m == micro - 1
            mel, speaker = (t.to(DEVICE) for t in data.sample(batch))

            for p in guess.parameters():
                p.requires_grad_(False)
            content, rec = conv(mel, speaker)
            loss_c = (F.l1_loss(rec.float(), mel) + 0.1 * confusion(guess(content))) / micro
            with amp.scale_loss(loss_c, opt_c, loss_id=0, delay_unscale=not last) as scaled:
                scaled.backward()

            for p in guess.parameters():
                p.requires_grad_(True)
            loss_g = F.cross_entropy(guess(content.detach()).float(), speaker) / micro
            with amp.scale_loss(loss_g, opt_g, loss_id=1, delay_unscale=not last) as scaled:
                scaled.backward()
            sums[0] += loss_c.item()
            sums[1] += loss_g.item()

        nn.utils.clip_grad_norm_(amp.master_params(opt_c), 1.0)
        nn.utils.clip_grad_norm_(amp.master_params(opt_g), 1.0)
        opt_c.step()
        opt_g.step()
        if step % 50 == 0:
            writer.add_scalar("loss/converter", sums[0], step)
            writer.add_scalar("loss/guess", sums[1], step)
        if step % 5000 == 0:
            torch.save({"conv": conv.state_dict(), "guess": guess.state_dict(), "opt_c": opt_c.state_dict(),
                        "opt_g": opt_g.state_dict(), "amp": amp.state_dict(), "step": step},
                       "%s/%06d.pt" % (logdir, step))


if __name__ == "__main__":
    train("/data/vctk_mels")
