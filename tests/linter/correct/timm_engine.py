from timm.utils import AverageMeter, NativeScaler, dispatch_clip_grad


def train_one_epoch(
    epoch, model, loader, optimizer, loss_fn, args, lr_scheduler=None, amp_autocast=None, loss_scaler=None
):
    update_time_m = AverageMeter()
    losses_m = AverageMeter()
    model.train()
    accum_steps = args.grad_accum_steps
    num_updates = epoch * len(loader)
    optimizer.zero_grad()
    for batch_idx, (input, target) in enumerate(loader):
        need_update = (batch_idx + 1) % accum_steps == 0

        def _forward():
            with amp_autocast():
                output = model(input)
                loss = loss_fn(output, target)
            if accum_steps > 1:
                loss /= accum_steps
            return loss

        def _backward(_loss):
            if loss_scaler is not None:
                loss_scaler(
                    _loss,
                    optimizer,
                    clip_grad=args.clip_grad,
                    clip_mode=args.clip_mode,
                    parameters=model.parameters(),
                    need_update=need_update,
                )
            else:
                _loss.backward()
                if need_update:
                    if args.clip_grad is not None:
                        dispatch_clip_grad(model.parameters(), value=args.clip_grad, mode=args.clip_mode)
                    optimizer.step()

        if not need_update:
            loss = _forward()
            _backward(loss)
            continue
        loss = _forward()
        _backward(loss)
        num_updates += 1
        optimizer.zero_grad()
        if lr_scheduler is not None:
            lr_scheduler.step_update(num_updates=num_updates, metric=losses_m.avg)
    return {"loss": losses_m.avg, "time": update_time_m.avg}


def main(args):
    loss_scaler = NativeScaler() if args.amp else None
    return loss_scaler
