import torch
from torchvision.models import resnet50

model = resnet50(weights="DEFAULT").cuda().half().eval()


@torch.inference_mode()
def predict(loader):
    for x in loader:
        yield model(x.cuda().half()).float().softmax(dim=-1)
