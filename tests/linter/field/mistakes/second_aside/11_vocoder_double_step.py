"""
# source: https://github.com/IAHispano/Applio/pull/860
# mistake: optim_d.step() and optim_g.step() are called in addition to scaler.step(), so each optimizer moves twice, also when the scaler had found infinite gradients.
# severity: error
# torch: any
"""
import torch
from torch.cuda.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP

from losses import discriminator_loss, feature_loss, generator_loss, kl_loss
from mel import mel_spectrogram, slice_segments
from utils import clip_grad_value


def train_and_evaluate(hps, epoch, nets, optims, scaler, train_loader, writer, cache):
    net_g, net_d = nets
    optim_g, optim_d = optims
    net_g.train()
    net_d.train()

    for batch_idx, (phone, pitch, spec, wave) in enumerate(train_loader):
        phone, pitch, spec, wave = (t.cuda(non_blocking=True) for t in (phone, pitch, spec, wave))

        with autocast(enabled=hps.train.fp16_run):
            y_hat, ids_slice, z_mask, (z_p, logs_q, m_p, logs_p) = net_g(phone, pitch, spec)
            wave = slice_segments(wave, ids_slice * hps.data.hop_length, hps.train.segment_size)
            y_d_r, y_d_g, _, _ = net_d(wave, y_hat.detach())
        with autocast(enabled=False):
            loss_disc, _, _ = discriminator_loss(y_d_r, y_d_g)

        optim_d.zero_grad()
        scaler.scale(loss_disc).backward()
        scaler.unscale_(optim_d)
        grad_norm_d = clip_grad_value(net_d.parameters(), None)
        scaler.step(optim_d)
        optim_d.step()  # <- here

        with autocast(enabled=hps.train.fp16_run):
            _, y_d_g, fmap_r, fmap_g = net_d(wave, y_hat)
        with autocast(enabled=False):
            loss_mel = torch.nn.functional.l1_loss(mel_spectrogram(wave), mel_spectrogram(y_hat.float()))
            loss_gen, _ = generator_loss(y_d_g)
            loss_all = (
                loss_gen + feature_loss(fmap_r, fmap_g) + 45 * loss_mel + kl_loss(z_p, logs_q, m_p, logs_p, z_mask)
            )

        optim_g.zero_grad()
        scaler.scale(loss_all).backward()
        scaler.unscale_(optim_g)
        grad_norm_g = clip_grad_value(net_g.parameters(), None)
        scaler.step(optim_g)
        optim_g.step()  # <- here
        scaler.update()

        if batch_idx % hps.train.log_interval == 0:
            writer.add_scalar("loss/g/total", loss_all, epoch)
            writer.add_scalar("grad/d", grad_norm_d, epoch)
            writer.add_scalar("grad/g", grad_norm_g, epoch)


def run(rank, hps, net_g, net_d, loader, writer):
    optims = [torch.optim.AdamW(n.parameters(), hps.train.learning_rate, eps=1e-9) for n in (net_g, net_d)]
    nets = [DDP(n.cuda(rank), device_ids=[rank]) for n in (net_g, net_d)]
    scaler = GradScaler(enabled=hps.train.fp16_run)
    for epoch in range(hps.train.epochs):
        train_and_evaluate(hps, epoch, nets, optims, scaler, loader, writer, [])
