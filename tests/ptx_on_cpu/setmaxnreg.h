// Twin of ptx/setmaxnreg.cuh.
#pragma once

template <int REGISTERS>
void shrink_registers() {
    static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24);
}
template <int REGISTERS>
void grow_registers() {
    static_assert(REGISTERS % 8 == 0 && REGISTERS <= 256);
}
