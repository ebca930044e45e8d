// Programmatic dependent launch, of Hopper and later: a kernel that is launched so (gpu/early.py) starts while the one
// before it in the stream runs, and waits where it must.
#pragma once

// Until the kernel before is done and what it wrote can be read; at once where this one was launched in the usual way.
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The kernel behind may start when all thread blocks of this one have come here, or ended.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
