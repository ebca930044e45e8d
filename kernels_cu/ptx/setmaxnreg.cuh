// A warpgroup gives registers away, or takes what others gave. All its warps must come here, in a kernel whose
// __launch_bounds__ fix the registers it starts with.
#pragma once

template <int REGISTERS>
__device__ void shrink_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ void grow_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
