"""Fourier transforms and complex numbers in float16: NumPy's float64 transforms, rounded, are the oracle."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db

from ampaudit import scan
from tests.support.native import emulated, verdict
from tests.support.wrap import Wrap

Transform = Callable[[torch.Tensor], torch.Tensor]
SIGNAL = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).half()


def rounded(values: numpy.ndarray) -> torch.Tensor:
    exact = torch.from_numpy(numpy.stack([values.real, values.imag], -1))
    return exact.half().float()


TRANSFORMS: dict[str, tuple[Transform, Callable[[numpy.ndarray], numpy.ndarray]]] = {
    "rfft": (torch.fft.rfft, numpy.fft.rfft),
    "fft": (torch.fft.fft, numpy.fft.fft),
    "padded": (lambda x: torch.fft.rfft(x[:, :50], n=64), lambda x: numpy.fft.rfft(x[:, :50], 64)),
    "ihfft": (torch.fft.ihfft, lambda x: numpy.conj(numpy.fft.rfft(x)) / 64),
    "other dimension": (lambda x: torch.fft.fft(x[:2], dim=0), lambda x: numpy.fft.fft(x[:2], axis=0)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_of_float16_is_complex32(name: str) -> None:
    """As CUDA gives it; the values within two roundings of the exact transform."""
    ours, oracle = TRANSFORMS[name]
    found = emulated(ours, (SIGNAL,))
    assert found.dtypes == [torch.complex32]
    values = torch.view_as_real(found.values[0])
    expected = rounded(oracle(SIGNAL.double().numpy()))
    assert torch.equal(values, values.half().float())
    assert float((values - expected).abs().max()) <= 2**-10 * float(expected.abs().max())


def test_there_and_back() -> None:
    found = emulated(lambda x: torch.fft.irfft(torch.fft.rfft(x)), (SIGNAL,))
    assert found.dtypes == [torch.float16]
    assert torch.allclose(found.values[0], SIGNAL.float(), atol=4e-3)


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
def test_the_zero_frequency_overflows_before_it_is_scaled(norm: str) -> None:
    """The sum of 1024 times 100 is 102,400; cuFFT's output is float16, and a scale is another kernel."""
    x = torch.full((1024,), 100.0).half()
    found = emulated(lambda x: torch.fft.fft(x, norm=norm), (x,)).values[0]
    assert verdict(found[:1]) != "finite"
    assert verdict(emulated(lambda x: torch.fft.fft(x, norm=norm), (x / 2,)).values[0]) == "finite"


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float16, 1000), (torch.bfloat16, 1024)],
    ids=["no power of two", "bfloat16"],
)
def test_without_a_kernel_the_audit_goes_on_in_float32(dtype: torch.dtype, size: int) -> None:
    found = emulated(torch.fft.rfft, (torch.ones(size, dtype=dtype),), dtype=dtype)
    assert found.dtypes == [torch.complex64]


class Spectrum(nn.Module):
    """Scales each frequency: overflows where the zero frequency does."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = gain
        self.head = nn.Linear(1024, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.gain))


def test_an_overflow_in_one_component_is_an_origin() -> None:
    report = scan(Spectrum(), torch.full((2, 1024), 100.0), policy="half")
    found = [f for f in report.findings if f.code == "AMP101"]
    assert [f.site for f in found] == ["(top)/fft_rfft"]
    assert report.exit_code == 1


def test_complex_values_are_measured_as_two_components() -> None:
    report = scan(Spectrum(), torch.randn(2, 1024), policy="half")
    assert not [f for f in report.findings if f.code in ("AMP101", "AMP901")]
    for name in ("(top)/fft_rfft", "(top)/mul"):
        seen = next(s.forward for s in report.sites if s.site == name)
        assert seen is not None
        assert seen.elements == 2 * 2 * 513
        assert seen.sqnr_db is not None
        assert 55 < seen.sqnr_db < 85


def test_an_overflowing_product_of_complex_numbers_is_named() -> None:
    report = scan(Spectrum(3e4), torch.randn(2, 1024), policy="half")
    assert [f.site for f in report.findings if f.code.startswith("AMP1")] == ["(top)/mul"]


@pytest.mark.parametrize(
    ("size", "dtype", "severity", "words"),
    [
        (1024, "float16", "warning", "no float16 kernel on a CPU"),
        (1000, "float16", "error", "powers of two"),
        (1024, "bfloat16", "error", "no bfloat16 kernel"),
    ],
)
def test_amp306_says_which_device_lacks_the_kernel(size: int, dtype: str, severity: str, words: str) -> None:
    class Power(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.rfft(x).abs()

    report = scan(Power(), torch.randn(2, size), policy="half", dtype=dtype)
    found = [f for f in report.findings if f.code == "AMP306"]
    assert [f.severity.value for f in found] == [severity]
    assert words in found[0].cause


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.quantile(0.5, dim=-1),
        lambda x: torch.view_as_complex(x.unflatten(-1, (4, 2))).abs(),
        lambda x: torch.complex(x, x).abs(),
        lambda x: torch.polar(x.abs(), x).real,
        lambda x: torch.cdist(x, x),
        lambda x: torch.cdist(x.repeat(9, 1), x),
        lambda x: torch.cdist(x.repeat(9, 1), x, p=1.0),
        lambda x: torch.cdist(x, x, compute_mode="use_mm_for_euclid_dist"),
        lambda x: torch.cdist(x.repeat(9, 1), x, compute_mode="donot_use_mm_for_euclid_dist"),
        lambda x: torch.special.ndtri(x.sigmoid()),
    ],
    ids=[
        *("quantile", "view_as_complex", "complex", "polar"),
        *("cdist", "large", "p", "product", "no product", "ndtri"),
    ],
)
def test_an_op_that_raises_in_16_bits_is_named(function: Transform, dtype: torch.dtype) -> None:
    x = torch.randn(3, 8)
    try:
        function(x.to(dtype))
        raises = False
    except RuntimeError:
        raises = True
    report = scan(Wrap(lambda m, x: function(x)), x, policy="half", dtype=dtype)
    assert ("AMP306" in {finding.code for finding in report.findings}) is raises


@pytest.mark.parametrize(
    ("name", "severity"), [("cholesky", "error"), ("det", "error"), ("histc", "warning")]
)
def test_amp306_is_an_error_where_no_device_has_a_kernel(name: str, severity: str) -> None:
    low = {torch.float16, torch.bfloat16}
    infos = [info for info in op_db if info.name in (name, f"linalg.{name}")]
    assert any(low & {*info.dtypes, *info.dtypesIfCUDA} for info in infos) == (severity == "warning")
    function = getattr(torch, name)
    report = scan(
        Wrap(lambda m, x: function(x @ x.mT + torch.eye(8, dtype=x.dtype))), torch.rand(8, 8), policy="half"
    )
    assert [f.severity for f in report.findings if f.code == "AMP306"] == [severity]
