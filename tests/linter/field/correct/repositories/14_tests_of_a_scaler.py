# tests of a scaler read and write the gradients on purpose
import pytest, torch

@pytest.mark.parametrize("fp16", [True, False])
def test_step_changes_weights(fp16):
    model = torch.nn.Linear(4, 4).cuda()
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cuda", enabled=fp16)
    before = model.weight.detach().clone()
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.float16, enabled=fp16):
            loss = model(torch.ones(2, 4, device="cuda")).sum()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    assert not torch.equal(before, model.weight)

def test_unscale_twice_raises():
    model = torch.nn.Linear(4, 4).cuda()
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(model(torch.ones(2, 4).cuda()).sum()).backward()
    scaler.unscale_(opt)
    with pytest.raises(RuntimeError):
        scaler.unscale_(opt)

def test_skips_on_inf():
    model = torch.nn.Linear(4, 4).cuda()
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(model(torch.ones(2, 4).cuda()).sum()).backward()
    model.weight.grad.fill_(float("inf"))
    assert scaler.step(opt) is None
    scale = scaler.get_scale()
    scaler.update()
    assert scaler.get_scale() < scale

def test_scale_is_in_gradients():
    w = torch.nn.Parameter(torch.ones(1).cuda())
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    scaler.scale(w.sum()).backward()
    assert w.grad.item() == 8.0
