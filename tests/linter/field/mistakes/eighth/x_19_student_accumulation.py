# source: agokrani/distillKitPlus issue #5
# mistake: the mean losses of all micro-batches are summed without dividing by their number, so the gradient grows with the accumulation
# severity: error
import torch
import torch.nn.functional as F
from torch.amp import GradScaler, autocast

OPTS = dict(
    student="student-base",
    teacher="teacher-large",
    micro_batch=4,
    accumulate=16,
    lr=0.02,
    momentum=0.9,
    temperature=2.0,
    mix=0.7,
    epochs=2,
    device="cuda",
)


def soft_target_loss(student_logits, teacher_logits, labels, temperature, mix):
    s = F.log_softmax(student_logits.float() / temperature, dim=-1)
    t = F.softmax(teacher_logits.float() / temperature, dim=-1)
    soft = F.kl_div(s, t, reduction="batchmean") * temperature**2
    hard = F.cross_entropy(student_logits.float(), labels)
    return mix * soft + (1 - mix) * hard


def teacher_forward(teacher, clips):
    with torch.no_grad(), autocast("cuda", dtype=torch.float16):
        return teacher(clips)


def update(optimizer, scaler, params, max_norm=10.0):
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return norm


def distil(student, teacher, loader, opts=OPTS):
    """Train an audio tagger from a larger one; one optimizer step per `accumulate` micro-batches."""
    dev = opts["device"]
    student.to(dev).train()
    teacher.to(dev).eval().requires_grad_(False)
    params = [p for p in student.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=opts["lr"], momentum=opts["momentum"])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = GradScaler("cuda", init_scale=2.0**13)
    k = opts["accumulate"]
    whole = len(loader) // k * k

    for epoch in range(opts["epochs"]):
        window = 0.0
        for i, (clips, labels) in enumerate(loader):
            if i == whole:
                break
            clips, labels = clips.to(dev), labels.to(dev)
            target = teacher_forward(teacher, clips)
            with autocast("cuda", dtype=torch.float16):
                logits = student(clips)
            loss = soft_target_loss(logits, target, labels, opts["temperature"], opts["mix"])
            scaler.scale(loss).backward()  # <- here
            window += loss.item()
            if (i + 1) % k == 0:
                norm = update(optimizer, scaler, params)
                print(f"epoch {epoch} update {(i + 1) // k}: loss {window / k:.4f} norm {float(norm):.2f}")
                window = 0.0
        schedule.step()
    return student
