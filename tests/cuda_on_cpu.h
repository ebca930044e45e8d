// Just enough of CUDA to run plain kernels as C++ on the CPU. The threads of a block are fibers that take turns from
// one barrier to the next, in a fixed order: a forgotten barrier shows in one of the orders 0, 1, 2, ... and ..., 2, 1, 0.
// Shared memory is filled with NaN before each block, so that what is read before it is written shows too.
#include <cmath>
#include <cstring>
#include <type_traits>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("shared_memory")))
extern char __start_shared_memory[], __stop_shared_memory[];

static struct { int x; } threadIdx, blockIdx;

using std::exp2;
using std::log;

static int min(int x, int y) { return x < y ? x : y; }

template <class T>
static T max(T x, T y) {
    if constexpr (std::is_floating_point_v<T>) return std::fmax(x, y);
    return x > y ? x : y;
}

template <class To, class From>
static To bits(From x) {
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
static float __int_as_float(int x) { return bits<float>(x); }
static float __uint_as_float(unsigned x) { return bits<float>(x); }
static unsigned __float_as_uint(float x) { return bits<unsigned>(x); }

constexpr int MAX_THREADS = 1024;
static ucontext_t scheduler, fibers[MAX_THREADS];
static const void* stands_at[MAX_THREADS];  // the barrier that a thread waits at

static void wait(const void* barrier) {
    const int me = threadIdx.x;
    stands_at[me] = barrier;
    swapcontext(&fibers[me], &scheduler);
    threadIdx.x = me;
}
#define __syncthreads() ({ static char barrier; wait(&barrier); })
// Named by headers that simt shares with the other families, and not called by simt.
void __syncwarp();
unsigned __ballot_sync(unsigned, bool);

template <class T>
static T __shfl_xor_sync(unsigned, T x, int lanes) {
    static T given[MAX_THREADS];
    static char all_have_given, all_have_taken;
    const int me = threadIdx.x;
    given[me] = x;
    wait(&all_have_given);
    const T taken = given[me ^ lanes];
    wait(&all_have_taken);
    return taken;
}

static void (*kernel)();
static void thread() {
    kernel();
    wait(nullptr);
}

// Runs `kernel` on every block; false where the threads of a block did not all come to the same barriers.
static bool launch(int grid, int threads, bool last_first) {
    constexpr size_t STACK = 256 << 10;
    static std::vector<char> stacks(MAX_THREADS * STACK);
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
        memset(__start_shared_memory, 0xff, __stop_shared_memory - __start_shared_memory);
        for (int t = 0; t < threads; ++t) {
            getcontext(&fibers[t]);
            fibers[t].uc_stack.ss_sp = &stacks[t * STACK];
            fibers[t].uc_stack.ss_size = STACK;
            makecontext(&fibers[t], thread, 0);
        }
        do {
            for (int n = 0; n < threads; ++n) {
                threadIdx.x = last_first ? threads - 1 - n : n;
                swapcontext(&scheduler, &fibers[threadIdx.x]);
            }
            for (int t = 0; t < threads; ++t)
                if (stands_at[t] != stands_at[0]) return false;
        } while (stands_at[0] != nullptr);
    }
    return true;
}
