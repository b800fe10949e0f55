"""Shows whether this CPU's own 16-bit kernels could replace emulation: same results, in less time.

Prints for each op the share of results that differ, and the times of its 16-bit and its float32 kernel (the
smallest of several). The sizes are those of BERT-base and ResNet-50.

    python -m benchmarks.native_speed [--repeats 15] [--json FILE]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from benchmarks.options import parser
from benchmarks.timing import repeated_seconds

Call = Callable[..., torch.Tensor]


def calls(scale: int) -> dict[str, tuple[Call, tuple[torch.Tensor, ...]]]:
    """Return ops with their float32 arguments; ``scale`` divides all sizes."""
    width, image = 768 // scale, 56 // scale
    states, wide = torch.randn(4, 128, width), torch.randn(4, 128, 4 * width)
    heads, pixels = torch.randn(4, 12, 128, 64), torch.randn(4, 64, image, image)
    convolve = functional.conv2d
    return {
        "linear": (functional.linear, (states, 0.03 * torch.randn(4 * width, width))),
        "matmul": (torch.matmul, (heads, heads.mT)),
        "conv2d, 3 x 3": (lambda x, w: convolve(x, w, padding=1), (pixels, 0.05 * torch.randn(64, 64, 3, 3))),
        "conv2d, 1 x 1": (convolve, (pixels, 0.1 * torch.randn(256, 64, 1, 1))),
        "layer_norm": (lambda x: functional.layer_norm(x, (width,)), (states,)),
        "softmax": (lambda x: x.softmax(-1), (torch.randn(4, 12, 128, 128),)),
        "gelu": (functional.gelu, (wide,)),
        "relu": (torch.relu, (pixels,)),
        "add": (torch.add, (wide, wide.flip(0))),
        "mul": (torch.mul, (wide, wide.flip(0))),
        "max_pool2d": (lambda x: functional.max_pool2d(x, 3, 2, 1), (pixels,)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, repeats=15).parse_args(arguments)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float16, torch.bfloat16):
        for name, (call, tensors) in calls(8 if options.smoke else 1).items():
            low = [tensor.to(dtype) for tensor in tensors]
            wide = [tensor.float() for tensor in low]
            differ = float((call(*low) != call(*wide).to(dtype)).float().mean())
            native, float32 = (  # both were called once already
                min(repeated_seconds(lambda c=call, t=side: c(*t), options.repeats)) for side in (low, wide)
            )
            rows.append({"op": name, "dtype": str(dtype)[6:], "differ": differ})
            rows[-1] |= {"native_s": native, "float32_s": float32}
            print(
                f"{name:14} {str(dtype)[6:]:9} {differ:9.4%} differ, {1e3 * native:8.3f} ms native, "
                f"{1e3 * float32:8.3f} ms in float32: {native / float32:.2f} x"
            )
    if options.json is not None:
        result = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
