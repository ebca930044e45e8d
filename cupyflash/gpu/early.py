"""Launches that start while the kernel before them in the stream runs, and wait in their own
(kernels_cu/ptx/launch.cuh): programmatic dependent launch, which CuPy does not have."""

from __future__ import annotations

import functools
from typing import Any

DRIVER = 12030  # the first that captures them


@functools.cache
def possible() -> bool:
    """Whether the driver takes them, under capture too."""
    from cupy.cuda import runtime

    return bool(runtime.driverGetVersion() >= DRIVER)


def launch(function: int, grid: int, threads: int, shared: int, stream: int, address: int) -> None:
    """As `launchKernel` of CuPy's driver, for the kernel's parameters at `address`."""
    (error,) = bindings().cuLaunchKernelEx(_config(grid, threads, shared, stream), function, address, 0)
    if error:
        from cupy.cuda.driver import CUDADriverError

        raise CUDADriverError(int(error))


@functools.cache  # an import statement costs 1 us in every launch
def bindings() -> Any:
    """Of the driver."""
    from cuda.bindings import driver

    return driver


@functools.lru_cache(1024)
def _config(grid: int, threads: int, shared: int, stream: int) -> Any:
    driver = bindings()
    attribute, config = driver.CUlaunchAttribute(), driver.CUlaunchConfig()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared, driver.CUstream(stream)
    config.attrs, config.numAttrs = [attribute], 1
    return config
