import torch
import torch.nn.functional as F


def train_one_epoch(
    student,
    teacher,
    teacher_without_ddp,
    loss_fn,
    data_loader,
    optimizer,
    lr_schedule,
    momentum_schedule,
    epoch,
    fp16_scaler,
    args,
):
    for it, (images, _) in enumerate(data_loader):
        it = len(data_loader) * epoch + it
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr_schedule[it]
        images = [im.cuda(non_blocking=True) for im in images]
        with torch.amp.autocast("cuda", enabled=fp16_scaler is not None):
            teacher_output = teacher(images[:2])
            student_output = student(images)
            loss = loss_fn(student_output, teacher_output, epoch)
        optimizer.zero_grad()
        if fp16_scaler is None:
            loss.backward()
            if args.clip_grad:
                clip_gradients(student, args.clip_grad)
            cancel_gradients_last_layer(epoch, student, args.freeze_last_layer)
            optimizer.step()
        else:
            fp16_scaler.scale(loss).backward()
            if args.clip_grad:
                fp16_scaler.unscale_(optimizer)
                clip_gradients(student, args.clip_grad)
            cancel_gradients_last_layer(epoch, student, args.freeze_last_layer)
            fp16_scaler.step(optimizer)
            fp16_scaler.update()
        with torch.no_grad():
            m = momentum_schedule[it]
            for param_q, param_k in zip(student.parameters(), teacher_without_ddp.parameters()):
                param_k.data.mul_(m).add_((1 - m) * param_q.detach().data)


def clip_gradients(model, clip):
    norms = []
    for name, p in model.named_parameters():
        if p.grad is not None:
            param_norm = p.grad.data.norm(2)
            norms.append(param_norm)
            clip_coef = clip / (param_norm + 1e-6)
            p.grad.data.mul_(clip_coef.clamp(max=1.0))
    return norms


def cancel_gradients_last_layer(epoch, model, freeze_last_layer):
    if epoch >= freeze_last_layer:
        return
    for n, p in model.named_parameters():
        if "last_layer" in n:
            p.grad = None


def soft(student, teacher, temperature):
    return F.kl_div(
        F.log_softmax(student / temperature, -1), F.softmax(teacher / temperature, -1), reduction="batchmean"
    )
