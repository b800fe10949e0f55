"""Converts an ONNX file to float16 with another project's converter.

    python benchmarks/onnx_peers.py NAME model.onnx inputs.npz out/model.onnx [LIMIT]

Inputs and outputs stay float32, and every other setting has the converter's default, except LIMIT: the
largest value that AutoCast leaves in float16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import onnx

Convert = Callable[..., onnx.ModelProto]
LIMIT_BYTES = 2_000_000_000  # a file of protocol buffers holds at most 2 GiB


def autocast(model: str, inputs: str, limit: float = 512.0) -> onnx.ModelProto:
    from modelopt.onnx.autocast import convert_to_mixed_precision

    return convert_to_mixed_precision(model, keep_io_types=True, calibration_data=inputs, data_max=limit)


def autocast_random(model: str, inputs: str) -> onnx.ModelProto:
    from modelopt.onnx.autocast import convert_to_mixed_precision

    return convert_to_mixed_precision(model, keep_io_types=True)


def autocast_bfloat16(model: str, inputs: str) -> onnx.ModelProto:
    from modelopt.onnx.autocast import convert_to_mixed_precision

    return convert_to_mixed_precision(
        model, low_precision_type="bf16", keep_io_types=True, calibration_data=inputs
    )


def common_float16(model: str, inputs: str) -> onnx.ModelProto:
    from onnxconverter_common.float16 import convert_float_to_float16

    return convert_float_to_float16(onnx.load(model), keep_io_types=True)


def common_float16_path(model: str, inputs: str) -> onnx.ModelProto:
    from onnxconverter_common.float16 import convert_float_to_float16_model_path

    return convert_float_to_float16_model_path(model, keep_io_types=True)


def common_auto(model: str, inputs: str) -> onnx.ModelProto:
    import numpy as np
    from onnxconverter_common.auto_mixed_precision import auto_convert_mixed_precision

    feed = dict(np.load(inputs))
    return auto_convert_mixed_precision(onnx.load(model), feed, rtol=1e-2, atol=1e-2, keep_io_types=True)


def runtime_float16(model: str, inputs: str) -> onnx.ModelProto:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    return convert_float_to_float16(onnx.load(model), keep_io_types=True)


PEERS: dict[str, Convert] = {
    "autocast": autocast,
    "autocast-random": autocast_random,
    "autocast-bfloat16": autocast_bfloat16,
    "common-float16": common_float16,
    "common-float16-path": common_float16_path,
    "common-auto": common_auto,
    "onnxruntime-float16": runtime_float16,
}


def main() -> None:
    name, model, inputs, output, *limit = sys.argv[1:]
    made = PEERS[name](model, inputs, *map(float, limit))
    large = made.ByteSize() > LIMIT_BYTES
    onnx.save(made, output, save_as_external_data=large, location=f"{Path(output).name}.data")


if __name__ == "__main__":
    main()
