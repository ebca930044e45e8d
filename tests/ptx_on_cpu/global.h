// Twin of ptx/global.cuh.
#pragma once

inline void store_global_16(void* address, uint4 x) {
    if ((unsigned long long)address % 16) on_cpu::fail("a store of 16 bytes to %p", address);
    *(uint4*)address = x;
}
