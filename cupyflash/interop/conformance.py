"""For mypy alone: each adapter has what the protocols say."""

from . import cupy_, jax_, jax_ops, numpy_, torch_, torch_ops, torch_shards
from .jax_gpu import Memory
from .protocol import CpuAdapter, GpuAdapter, Library, Recorder

_libraries: tuple[Library, ...] = (numpy_, cupy_, torch_, torch_shards, jax_)
_on_cpu: tuple[CpuAdapter, ...] = (numpy_, torch_)
_on_gpu: tuple[GpuAdapter, ...] = (cupy_, torch_, Memory(0))
_recorders: tuple[Recorder, ...] = (torch_ops.run, jax_ops.run)
