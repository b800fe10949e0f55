# style of: ultralytics/yolov5:detect.py
# torch: 1.9+
import argparse
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image


def load(weights, device):
    half = device.type != "cpu"  # half precision is for CUDA only
    model = torch.jit.load(weights, map_location=device).eval()
    if half:
        model.half()
    return model, half


def letterbox(path, size=640):
    im = Image.open(path).convert("RGB")
    r = size / max(im.size)
    new = (round(im.width * r), round(im.height * r))
    canvas = Image.new("RGB", (size, size), (114, 114, 114))
    canvas.paste(im.resize(new), (0, 0))
    return np.asarray(canvas).transpose(2, 0, 1).copy(), r


@torch.no_grad()
def run(weights, source, device="cuda:0", conf_thres=0.25, iou_thres=0.45):
    device = torch.device(device if torch.cuda.is_available() else "cpu")
    model, half = load(weights, device)
    if half:
        model(torch.zeros(1, 3, 640, 640, device=device, dtype=torch.half))  # warm-up
    results = {}
    for path in sorted(Path(source).glob("*.jpg")):
        array, ratio = letterbox(path)
        im = torch.from_numpy(array).to(device)
        im = im.half() if half else im.float()
        im /= 255
        pred = model(im[None])[0].float()  # post-processing in float32
        pred = pred[pred[:, 4] > conf_thres]
        if not len(pred):
            results[path.name] = []
            continue
        scores, labels = (pred[:, 5:] * pred[:, 4:5]).max(1)
        xy, wh = pred[:, :2], pred[:, 2:4]
        boxes = torch.cat((xy - wh / 2, xy + wh / 2), 1)
        keep = torchvision.ops.batched_nms(boxes, scores, labels, iou_thres)
        results[path.name] = torch.cat((boxes[keep] / ratio, scores[keep, None]), 1).cpu().tolist()
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", default="detector.torchscript")
    parser.add_argument("--source", default="images")
    parser.add_argument("--device", default="cuda:0")
    opt = parser.parse_args()
    for name, rows in run(**vars(opt)).items():
        print(name, len(rows))
