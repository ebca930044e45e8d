// Twin of ptx/barrier.cuh.
#pragma once

namespace on_cpu {

inline const char* name_of_barrier(int number) {
    static const char* const names[16] = {
        "barrier 0", "barrier 1", "barrier 2",  "barrier 3",  "barrier 4",  "barrier 5",  "barrier 6",  "barrier 7",
        "barrier 8", "barrier 9", "barrier 10", "barrier 11", "barrier 12", "barrier 13", "barrier 14", "barrier 15"};
    if (number < 0 || number > 15) fail("there is no barrier %d", number);
    return names[number];
}

}  // namespace on_cpu

template <int THREADS>
bool all_threads(int number, bool yes) {
    static_assert(THREADS % 32 == 0);
    return on_cpu::meet(on_cpu::me->block->barriers[number], THREADS, on_cpu::name_of_barrier(number), yes);
}

template <int THREADS>
void sync_threads(int number) {
    all_threads<THREADS>(number, true);
}

template <int THREADS>
void arrive_threads(int number) {
    on_cpu::meet(on_cpu::me->block->barriers[number], THREADS, on_cpu::name_of_barrier(number), true, false);
}
