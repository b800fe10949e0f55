# source: a tutorial of open_clip, re-expressed: the model on the CPU is not the one that is passed
import torch
from quantizers import load_model, with_int8_layers

model, transform = load_model("large")
model = model.cuda()


def embed(model, images):
    with torch.autocast("cuda", dtype=torch.float16):
        return model(images)


def repeat(call):
    for _ in range(3):
        call()


images = torch.randn(8, 3, 224, 224, device="cuda")
repeat(lambda: embed(model, images))
model = model.cpu()
smaller = with_int8_layers(model).cuda()
smaller.eval()
repeat(lambda: embed(smaller, images))
