// Tensor-core products of Hopper: a warpgroup (four warps) computes D (64 x N, float32) = or += A (64 x 16) B (16 x N)
// in the background. Each warp holds 16 rows of D and, where it comes from registers, of A, laid out as for mma.sync.
// Operands in shared memory are given by descriptors (tile/swizzled.cuh).
#pragma once

// Before the first product after registers of D or A were touched.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// What was issued since the last commit becomes one group.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most PENDING groups are under way.
template <int PENDING>
__device__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The operands of an asm statement for the D of N columns: d[n] holds the four numbers of column group n.
#define D1(c, n) c(d[n][0]), c(d[n][1]), c(d[n][2]), c(d[n][3])
#define D2(c, n) D1(c, n), D1(c, n + 1)
#define D4(c, n) D2(c, n), D2(c, n + 2)
#define D_8(c) D1(c, 0)
#define D_16(c) D2(c, 0)
#define D_24(c) D2(c, 0), D1(c, 2)
#define D_32(c) D4(c, 0)
#define D_40(c) D_32(c), D1(c, 4)
#define D_48(c) D_40(c), D1(c, 5)
#define D_64(c) D_32(c), D4(c, 4)
#define D_80(c) D_64(c), D2(c, 8)
#define D_96(c) D_80(c), D2(c, 10)
#define D_112(c) D_96(c), D2(c, 12)
#define D_128(c) D_112(c), D2(c, 14)
#define D_144(c) D_128(c), D2(c, 16)
#define D_160(c) D_144(c), D2(c, 18)
#define D_176(c) D_160(c), D2(c, 20)
#define D_192(c) D_176(c), D2(c, 22)
#define D_208(c) D_192(c), D2(c, 24)
#define D_224(c) D_208(c), D2(c, 26)
#define D_240(c) D_224(c), D2(c, 28)
#define D_256(c) D_240(c), D2(c, 30)

// Their names in its text.
#define NAMES_8 "%0, %1, %2, %3"
#define NAMES_16 NAMES_8 ", %4, %5, %6, %7"
#define NAMES_24 NAMES_16 ", %8, %9, %10, %11"
#define NAMES_32 NAMES_24 ", %12, %13, %14, %15"
#define NAMES_40 NAMES_32 ", %16, %17, %18, %19"
#define NAMES_48 NAMES_40 ", %20, %21, %22, %23"
#define NAMES_64 NAMES_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_80 NAMES_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_96 NAMES_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_112 NAMES_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_128 NAMES_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_144 NAMES_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES_160 NAMES_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_176 NAMES_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define NAMES_192 NAMES_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_208 NAMES_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define NAMES_224 NAMES_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_240 NAMES_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define NAMES_256 NAMES_240 ", %120, %121, %122, %123, %124, %125, %126, %127"

// What a statement says that multiplies tiles in shared memory: one to four STEPS of K. One alone takes its descriptors
// as they are; those of more go on in place, by NEXT_A and NEXT_B (16 bytes): fewer instructions than if each is made
// anew. Steps that are not taken are gone from the code. All but KIND, MAJOR and ADD (what the first step does) are
// numbers of operands.
#define WGMMA_STEPS(N, KIND, MAJOR, ADD, A, B, NEXT_A, NEXT_B, STEPS)                                              \
    "{ .reg .pred add, more; .reg .b32 low, high; .reg .b64 a, b; setp.ne.b32 add, " #ADD ", 0; "                  \
    "setp.eq.s32 more, %" #STEPS ", 1; @more " WGMMA_STEP(N, KIND, MAJOR, "%" #A, "%" #B)                          \
    "setp.gt.s32 more, %" #STEPS ", 1; mov.b64 a, %" #A "; mov.b64 b, %" #B "; "                                   \
    "@more " WGMMA_STEP(N, KIND, MAJOR, "a", "b") "setp.ne.b32 add, 1, 0; " WGMMA_NEXT(NEXT_A, NEXT_B)             \
    "@more " WGMMA_STEP(N, KIND, MAJOR, "a", "b") "setp.gt.s32 more, %" #STEPS ", 2; " WGMMA_NEXT(NEXT_A, NEXT_B)  \
    "@more " WGMMA_STEP(N, KIND, MAJOR, "a", "b") "setp.gt.s32 more, %" #STEPS ", 3; " WGMMA_NEXT(NEXT_A, NEXT_B)  \
    "@more " WGMMA_STEP(N, KIND, MAJOR, "a", "b") "}"
#define WGMMA_NEXT(NEXT_A, NEXT_B)                                                          \
    "mov.b64 {low, high}, a; add.u32 low, low, %" #NEXT_A "; mov.b64 a, {low, high}; "      \
    "mov.b64 {low, high}, b; add.u32 low, low, %" #NEXT_B "; mov.b64 b, {low, high}; "
#define WGMMA_STEP(N, KIND, MAJOR, A, B)                                                                \
    "wgmma.mma_async.sync.aligned.m64n" #N KIND " {" NAMES_##N "}, " A ", " B ", add, 1, 1" MAJOR "; "

// wgmma_start: D = A B;  wgmma: D += A B, both operands in shared memory, over STEPS of K. TRANSPOSED_A: columns of A
// are contiguous, not rows ("M-major" instead of "K-major"), and a step goes on by 16 rows, not 32 bytes; TRANSPOSED_B:
// rows of B, not columns.
// With A in registers rows of B are contiguous by default. I to P number the operands after those of D.
#define WGMMA(N, TYPE, NAME, I, J, K, L, M, O, P)                                                                      \
    template <int STEPS = 1, int TRANSPOSED_A = 0, int TRANSPOSED_B = 0>                                               \
    __device__ void wgmma_start(float (&d)[N / 8][4], unsigned long long a, unsigned long long b, TYPE) {              \
        asm volatile(WGMMA_STEPS(N, "k16.f32." NAME "." NAME, ", %" #K ", %" #L, 0, I, J, M, O, P)                     \
                     : D_##N("=f")                                                                                     \
                     : "l"(a), "l"(b), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B), "n"(TRANSPOSED_A ? 128 : 2),              \
                       "n"(TRANSPOSED_B ? 128 : 2), "n"(STEPS));                                                       \
    }                                                                                                                  \
    template <int STEPS = 1, int TRANSPOSED_A = 0, int TRANSPOSED_B = 0>                                               \
    __device__ void wgmma(float (&d)[N / 8][4], unsigned long long a, unsigned long long b, TYPE) {                    \
        asm volatile(WGMMA_STEPS(N, "k16.f32." NAME "." NAME, ", %" #K ", %" #L, 1, I, J, M, O, P)                     \
                     : D_##N("+f")                                                                                     \
                     : "l"(a), "l"(b), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B), "n"(TRANSPOSED_A ? 128 : 2),              \
                       "n"(TRANSPOSED_B ? 128 : 2), "n"(STEPS));                                                       \
    }                                                                                                                  \
    template <int TRANSPOSED_B = 1>                                                                                    \
    __device__ void wgmma_start(float (&d)[N / 8][4], const unsigned (&a)[4], unsigned long long b, TYPE) {            \
        asm volatile("{ .reg .pred add; setp.ne.b32 add, 0, 0; "                                                       \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" NAMES_##N "}, {%" #I ", %" #J\
                     ", %" #K ", %" #L "}, %" #M ", add, 1, 1, %" #O "; }"                                             \
                     : D_##N("=f")                                                                                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED_B));                         \
    }                                                                                                                  \
    template <int TRANSPOSED_B = 1>                                                                                    \
    __device__ void wgmma(float (&d)[N / 8][4], const unsigned (&a)[4], unsigned long long b, TYPE) {                  \
        asm volatile("{ .reg .pred add; setp.ne.b32 add, 1, 0; "                                                       \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" NAMES_##N "}, {%" #I ", %" #J\
                     ", %" #K ", %" #L "}, %" #M ", add, 1, 1, %" #O "; }"                                             \
                     : D_##N("+f")                                                                                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED_B));                         \
    }
#define WGMMA_BOTH_TYPES(N, ...)                \
    WGMMA(N, half_t, "f16", __VA_ARGS__)        \
    WGMMA(N, bfloat16_t, "bf16", __VA_ARGS__)

// Of numbers of 8 bits, 32 of K at once; both operands "K-major".
#define WGMMA_8(N, I, J, K, L, M)                                                                                      \
    template <int STEPS = 1, int = 0, int = 0>                                                                         \
    __device__ void wgmma_start(float (&d)[N / 8][4], unsigned long long a, unsigned long long b, float8_t) {          \
        asm volatile(WGMMA_STEPS(N, "k32.f32.e4m3.e4m3", "", 0, I, J, K, K, L)                                         \
                     : D_##N("=f")                                                                                     \
                     : "l"(a), "l"(b), "n"(2), "n"(STEPS));                                                            \
    }                                                                                                                  \
    template <int STEPS = 1, int = 0, int = 0>                                                                         \
    __device__ void wgmma(float (&d)[N / 8][4], unsigned long long a, unsigned long long b, float8_t) {                \
        asm volatile(WGMMA_STEPS(N, "k32.f32.e4m3.e4m3", "", 1, I, J, K, K, L)                                         \
                     : D_##N("+f")                                                                                     \
                     : "l"(a), "l"(b), "n"(2), "n"(STEPS));                                                            \
    }                                                                                                                  \
    __device__ inline void wgmma(float (&d)[N / 8][4], const unsigned (&a)[4], unsigned long long b, float8_t) {       \
        asm volatile("{ .reg .pred add; setp.ne.b32 add, 1, 0; "                                                       \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" NAMES_##N "}, {%" #I ", %" #J        \
                     ", %" #K ", %" #L "}, %" #M ", add, 1, 1; }"                                                      \
                     : D_##N("+f")                                                                                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                            \
    }

WGMMA_8(64, 32, 33, 34, 35, 36)
WGMMA_8(80, 40, 41, 42, 43, 44)
WGMMA_8(96, 48, 49, 50, 51, 52)
WGMMA_8(128, 64, 65, 66, 67, 68)
WGMMA_8(192, 96, 97, 98, 99, 100)
WGMMA_8(256, 128, 129, 130, 131, 132)

WGMMA_BOTH_TYPES(8, 4, 5, 6, 7, 8, 9, 10)
WGMMA_BOTH_TYPES(16, 8, 9, 10, 11, 12, 13, 14)
WGMMA_BOTH_TYPES(24, 12, 13, 14, 15, 16, 17, 18)
WGMMA_BOTH_TYPES(32, 16, 17, 18, 19, 20, 21, 22)
WGMMA_BOTH_TYPES(40, 20, 21, 22, 23, 24, 25, 26)
WGMMA_BOTH_TYPES(48, 24, 25, 26, 27, 28, 29, 30)
WGMMA_BOTH_TYPES(64, 32, 33, 34, 35, 36, 37, 38)
WGMMA_BOTH_TYPES(80, 40, 41, 42, 43, 44, 45, 46)
WGMMA_BOTH_TYPES(96, 48, 49, 50, 51, 52, 53, 54)
WGMMA_BOTH_TYPES(112, 56, 57, 58, 59, 60, 61, 62)
WGMMA_BOTH_TYPES(128, 64, 65, 66, 67, 68, 69, 70)
WGMMA_BOTH_TYPES(144, 72, 73, 74, 75, 76, 77, 78)
WGMMA_BOTH_TYPES(160, 80, 81, 82, 83, 84, 85, 86)
WGMMA_BOTH_TYPES(176, 88, 89, 90, 91, 92, 93, 94)
WGMMA_BOTH_TYPES(192, 96, 97, 98, 99, 100, 101, 102)
WGMMA_BOTH_TYPES(208, 104, 105, 106, 107, 108, 109, 110)
WGMMA_BOTH_TYPES(224, 112, 113, 114, 115, 116, 117, 118)
WGMMA_BOTH_TYPES(240, 120, 121, 122, 123, 124, 125, 126)
WGMMA_BOTH_TYPES(256, 128, 129, 130, 131, 132, 133, 134)
