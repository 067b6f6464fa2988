"""Write and load the export format `int8`, a classifier's ONNX graph in 8-bit integers."""

from pathlib import Path
from types import SimpleNamespace

from duetgan.inference.export import onnx
from duetgan.inference.export.subject import Subject
from duetgan.inference.export.torch_export import quiet

load = onnx.load


def write(subject: Subject, path: Path) -> None:
    """Write an ONNX graph with static int8 quantization.

    Each output channel of the weights has a scale. The scales of activations come from the ranges
    of their values for the calibration images. Weights use 7 of the 8 bits, because sums of two
    products must fit into 16 bits on CPUs without VNNI.
    """
    from onnxruntime import quantization  # an optional package
    from onnxruntime.quantization.shape_inference import quant_pre_process

    images = iter([onnx.arrays(subject, batch) for batch in subject.calibration])
    exact, prepared = path.with_name("fp32.onnx"), path.with_name("prepared.onnx")
    onnx.write(subject, exact)
    with quiet():
        quant_pre_process(str(exact), str(prepared), skip_symbolic_shape=True)
        quantization.quantize_static(
            str(prepared),
            str(path),
            # This has the interface of onnxruntime's CalibrationDataReader.
            SimpleNamespace(get_next=lambda: next(images, None)),
            quant_format=quantization.QuantFormat.QDQ,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            per_channel=True,
            reduce_range=True,
        )
