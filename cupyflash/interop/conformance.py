"""For mypy alone: each adapter has what the protocols say."""

from . import cupy_, jax_, numpy_, torch_, torch_ops
from .jax_gpu import Loan
from .protocol import CpuAdapter, GpuAdapter, Library, Recorder

_libraries: tuple[Library, ...] = (numpy_, cupy_, torch_, jax_)
_on_cpu: tuple[CpuAdapter, ...] = (numpy_, torch_, jax_)
_on_gpu: tuple[GpuAdapter, ...] = (cupy_, torch_, Loan())
_recorders: tuple[Recorder, ...] = (torch_ops,)
