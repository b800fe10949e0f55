# style of: jaywalnut310/vits:train.py
# torch: 1.6+
import torch
from torch.cuda.amp import GradScaler, autocast

from losses import discriminator_loss, feature_loss, generator_loss, kl_loss
from mel import spec_to_mel


def total_grad_norm(parameters, clip_value=None):
    """Optionally clip by value; always return the 2-norm before clipping."""
    params = [p for p in parameters if p.grad is not None]
    total = 0.0
    for p in params:
        total += p.grad.data.norm(2).item() ** 2
        if clip_value is not None:
            p.grad.data.clamp_(min=-clip_value, max=clip_value)
    return total ** 0.5


def train_and_evaluate(rank, epoch, hps, nets, optims, scaler, loader, writer=None):
    net_g, net_d = nets
    optim_g, optim_d = optims
    net_g.train()
    net_d.train()
    for batch_idx, (text, text_len, spec, spec_len, wav) in enumerate(loader):
        text, text_len = text.cuda(rank, non_blocking=True), text_len.cuda(rank, non_blocking=True)
        spec, spec_len = spec.cuda(rank, non_blocking=True), spec_len.cuda(rank, non_blocking=True)
        wav = wav.cuda(rank, non_blocking=True)

        with autocast(enabled=hps.train.fp16_run):
            fake, l_dur, z_mask, (z_p, m_p, logs_p, logs_q) = net_g(text, text_len, spec, spec_len)
            y_d_real, y_d_fake, _, _ = net_d(wav, fake.detach())
            with autocast(enabled=False):
                loss_disc, _, _ = discriminator_loss(
                    [y.float() for y in y_d_real], [y.float() for y in y_d_fake]
                )
        optim_d.zero_grad()
        scaler.scale(loss_disc).backward()
        scaler.unscale_(optim_d)
        grad_norm_d = total_grad_norm(net_d.parameters(), None)
        scaler.step(optim_d)

        with autocast(enabled=hps.train.fp16_run):
            _, y_d_fake, fmap_r, fmap_g = net_d(wav, fake)
            with autocast(enabled=False):
                mel = spec_to_mel(spec.float(), hps.data)
                fake_mel = spec_to_mel(fake.float(), hps.data)
                loss_mel = torch.nn.functional.l1_loss(mel, fake_mel) * hps.train.c_mel
                loss_kl = kl_loss(z_p.float(), logs_q.float(), m_p.float(), logs_p.float(), z_mask.float())
                loss_fm = feature_loss(fmap_r, fmap_g)
                loss_gen, _ = generator_loss([y.float() for y in y_d_fake])
                loss_gen_all = loss_gen + loss_fm + loss_mel + l_dur.float().sum() + loss_kl * hps.train.c_kl
        optim_g.zero_grad()
        scaler.scale(loss_gen_all).backward()
        scaler.unscale_(optim_g)
        grad_norm_g = total_grad_norm(net_g.parameters(), None)
        scaler.step(optim_g)
        # both optimizers have stepped: one update for the iteration
        scaler.update()

        if writer is not None and batch_idx % hps.train.log_interval == 0:
            writer.add_scalar("grad_norm_d", grad_norm_d, batch_idx)
            writer.add_scalar("grad_norm_g", grad_norm_g, batch_idx)


def build_scaler(hps):
    return GradScaler(enabled=hps.train.fp16_run)
