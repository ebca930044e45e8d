// Twin of ptx/launch.cuh: launches come one after the other.
#pragma once

inline void wait_for_kernel_before() {}
inline void let_next_kernel_start() {}
