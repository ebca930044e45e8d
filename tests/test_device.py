"""What is known about GPUs, with none at hand: the table, and the message for everything that may be missing."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from cupyflash.gpu import device
from cupyflash.gpu.device import Arch


class CUDARuntimeError(RuntimeError):
    """Stands for CuPy's."""


def fake_cupy(count=1, cc="90", driver=13020, built=13020, error=None):
    """CuPy on a machine of our choice."""

    def device_count():
        if error:
            raise CUDARuntimeError(error)
        return count

    attributes = {"sms": 7, "shared": 99}
    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=device_count,
        driverGetVersion=lambda: driver,
        runtimeGetVersion=lambda: built,
        cudaDevAttrMultiProcessorCount="sms",
        cudaDevAttrMaxSharedMemoryPerBlockOptin="shared",
        deviceGetAttribute=lambda attribute, ordinal: attributes[attribute],
    )
    return SimpleNamespace(
        cuda=SimpleNamespace(runtime=runtime, Device=lambda ordinal: SimpleNamespace(compute_capability=cc))
    )


@pytest.fixture
def current(monkeypatch):
    def on(ordinal=0, **machine):
        monkeypatch.setattr(device, "import_cupy", lambda: fake_cupy(**machine))
        return device.current.__wrapped__(ordinal)

    return on


@pytest.mark.parametrize(
    "name, arch",
    [
        ("sm_75", Arch("sm_75", 75, 40, 65536)),
        ("sm_80", Arch("sm_80", 80, 108, 166912)),
        ("sm_89", Arch("sm_89", 89, 128, 101376)),
        ("sm_90a", Arch("sm_90a", 90, 132, 232448)),
        ("sm_120", Arch("sm_120", 120, 170, 101376)),
    ],
)
def test_typical(name, arch):
    assert Arch.of(name) == arch


@pytest.mark.parametrize("asked, compiled_for", [("sm_90", "sm_90a"), ("sm_100a", "sm_100"), ("sm_120f", "sm_120")])
def test_a_suffix_is_what_the_gpu_would_be_given(asked, compiled_for, current):
    """Or a cache filled without a GPU would hold what no GPU asks for."""
    assert Arch.of(asked).name == compiled_for == current(cc=str(Arch.of(asked).cc)).name


@pytest.mark.parametrize("name", ["sm_70", "sm_999", "90", "compute_90", "sm_90x", "", None])
def test_unknown_arch(name):
    with pytest.raises(ValueError, match=r"arch is .*; it must be one of sm_75, .*sm_90a"):
        Arch.of(name)


def test_current(current):
    assert current(cc="86") == Arch("sm_86", 86, 7, 99)
    assert current(cc="120").cc == 120


def test_no_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"need CuPy.*pip install "):
        device.import_cupy()


def test_no_driver(current):
    with pytest.raises(RuntimeError, match=r"no NVIDIA driver was found; install one .*NumPy arrays.*\(insufficient"):
        current(error="insufficient driver", driver=0)


def test_driver_older_than_cupy(current):
    with pytest.raises(RuntimeError, match=r'driver is for CUDA 12.4 but this CuPy is for CUDA 13.2;.*\[cuda12\]"'):
        current(error="insufficient driver", driver=12040)


def test_no_gpu(current):
    with pytest.raises(RuntimeError, match="CUDA sees no GPU; look at nvidia-smi and at CUDA_VISIBLE_DEVICES"):
        current(error="no device")


def test_no_such_gpu(current):
    with pytest.raises(RuntimeError, match="GPU 3 was asked for, but CUDA sees 2 GPUs"):
        current(3, count=2)


def test_gpu_too_old(current):
    with pytest.raises(RuntimeError, match=r"GPU 0 has compute capability 7.0; the kernels need 7.5 .*NumPy"):
        current(cc="70")


@pytest.mark.gpu
def test_current_is_this_gpu():
    arch = device.current(0)
    assert arch.name.startswith(f"sm_{arch.cc}")
    assert arch.sms > 0
    assert arch.shared_memory >= 65536
    assert device.current(0) is arch
