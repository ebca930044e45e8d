// Twin of ptx/wgmma.cuh: products are computed when they are asked for, or when they are waited for. Until they are, D
// is NaN.
#pragma once
#include "ptx_on_cpu/mma.h"

namespace on_cpu {

// Element (i, k) of an operand in shared memory; `along_k`: k is contiguous ("K-major").
struct Descriptor {
    Block* of;
    unsigned start, block, eight;  // bytes: address; distance of 64 columns; of eight rows
    bool along_k;

    Descriptor(Block* of, unsigned long long bits, bool along_k)
        : of(of),
          start((bits & 0x3fff) << 4),
          block((bits >> 16 & 0x3fff) << 4),
          eight((bits >> 32 & 0x3fff) << 4),
          along_k(along_k) {
        if (bits >> 62 != 1 || bits >> 49 & 7) fail("a descriptor %llx without the 128-byte swizzle", bits);
    }

    // Eight numbers that lie side by side: of row `row`, from `col` on.
    void eight_at(int row, int col, unsigned short (&x)[8]) const {
        unsigned address = start + row / 8 * eight + row % 8 * 128 + col / 64 * block + col % 64 * 2;
        address ^= (address >> 7 & 7) << 4;
        note_hardware(*of, address, 16, false);
        memcpy(x, of->memory + address, 16);
    }

    // f(i, k, number) for i from `first` on
    template <class F>
    void each(int first, int count, F f) const {
        unsigned short x[8];
        for (int outer = 0; outer < (along_k ? count : 16); outer++)
            for (int inner = 0; inner < (along_k ? 16 : count); inner += 8) {
                eight_at(outer + (along_k ? first : 0), inner + (along_k ? 0 : first), x);
                for (int e = 0; e < 8; e++) along_k ? f(outer, inner + e, x[e]) : f(inner + e, outer, x[e]);
            }
    }

    // All of it must lie in what the launch asked for.
    void check(int count) const {
        int rows = along_k ? count : 16, columns = along_k ? 16 : count;
        at(*of, address_in(*of, start & ~1023u), 1, 1);
        at(*of, address_in(*of, (start + (rows - 1) / 8 * eight + (columns - 1) / 64 * block) & ~1023u), 1024, 1);
    }
};

// D has n columns; A is in registers where these are given.
template <class T>
void start_product(const char* name, int n, float* d, const unsigned* a_registers, unsigned long long a_bits,
                   unsigned long long b_bits, bool add, bool transposed_a, bool transposed_b) {
    struct Given {
        float* d;
        const unsigned* a;
        unsigned long long a_bits, b_bits;
    } mine{d, a_registers, a_bits, b_bits};
    together(name, mine, [&](Given** lanes) {
        std::vector<Given> given(32);
        for (int l = 0; l < 32; l++) {
            given[l] = *lanes[l];
            if (given[l].a_bits != a_bits || given[l].b_bits != b_bits)
                fail("lanes of a warp give different descriptors");
        }
        Block* block = me->block;
        if (!my_warp().fenced) fail("%s without wgmma_fence after the last group", name);
        int row = me->thread / 32 % 4 * 16;
        Descriptor a(block, a_registers ? 1ull << 62 : a_bits, !transposed_a), b(block, b_bits, !transposed_b);
        if (!a_registers) a.check(64);
        b.check(n);
        // What D holds until then. Of products on one D under way, only the first finds what was there before.
        Warp& warp = my_warp();
        bool first = warp.under_way[given[0].d]++ == 0, kept = first && add && now.last_first;
        std::vector<float> before(kept ? 32 * n / 2 : 0);
        for (int l = 0; l < 32 && now.last_first; l++) {
            if (kept) memcpy(&before[l * n / 2], given[l].d, 2 * n);
            if (first || !add) std::fill_n(given[l].d, n / 2, NAN);
        }
        warp.products.add([=, &warp, before = std::move(before), given = std::move(given)] {
            constexpr int PARTS = sizeof(T) == 1 ? 2 : 1;  // numbers in 16 bits, and products of 16 of K
            static Eight b_numbers[PARTS][16 * 32], c[16 * 32];  // for n up to 256
            float a_numbers[PARTS][16][16];
            auto* c_flat = (float*)c;
            auto place = [](int k, unsigned short x, auto f) {
                for (int part = 0; part < PARTS; part++) {
                    int at = PARTS * k + part;
                    f(at / 16, at % 16, float_of(T(), PARTS == 2 ? x >> 8 * part & 255 : x));
                }
            };
            b.each(0, n, [&](int j, int k, unsigned short x) {
                place(k, x, [&](int part, int k, float y) { ((float*)b_numbers[part])[k * n + j] = y; });
            });
            if (!a_registers)
                a.each(row, 16, [&](int i, int k, unsigned short x) {
                    place(k, x, [&](int part, int k, float y) { a_numbers[part][i][k] = y; });
                });
            else if constexpr (PARTS == 1)
                unpack_a<T>(a_numbers[0], [&](int l) { return given[l].a; });
            else
                for (int l = 0; l < 32; l++)
                    for (int i = 0; i < 4; i++)
                        for (int e = 0; e < 4; e++)
                            a_numbers[i / 2][l / 4 + i % 2 * 8][l % 4 * 4 + e] = float_of(T(), given[l].a[i] >> 8 * e & 255);
            auto each = [&](auto f) {
                for (int l = 0; l < 32; l++)
                    for (int i = 0; i < n / 2; i++)
                        f(l, i, c_flat[(l / 4 + i % 4 / 2 * 8) * n + i / 4 * 8 + l % 4 * 2 + i % 2]);
            };
            each([&](int l, int i, float& x) { x = !add ? 0 : kept ? before[l * n / 2 + i] : given[l].d[i]; });
            for (int part = 0; part < PARTS; part++) add_product(c, a_numbers[part], b_numbers[part], n / 8);
            each([&](int l, int i, float x) { given[l].d[i] = x; });
            warp.under_way[given[0].d]--;
        });
    });
}

}  // namespace on_cpu

inline void wgmma_fence() { on_cpu::my_warp().fenced = true; }
inline void wgmma_commit() {
    int nothing;
    on_cpu::together("wgmma_commit", nothing, [](int**) {
        on_cpu::my_warp().products.commit();
        on_cpu::my_warp().fenced = false;
    });
}
template <int PENDING>
void wgmma_wait() {
    int nothing;
    on_cpu::together("wgmma_wait", nothing, [](int**) { on_cpu::my_warp().products.finish(PENDING); });
}

namespace on_cpu {

// Steps of K of one statement: each goes on by 16 rows, or by 32 bytes.
template <class T, int STEPS, int TRANSPOSED_A, int TRANSPOSED_B>
void start_steps(const char* name, int n, float* d, unsigned long long a, unsigned long long b, bool add) {
    static_assert(STEPS >= 1 && STEPS <= 4);
    for (int k = 0; k < STEPS; k++)
        start_product<T>(name, n, d, nullptr, a + k * (TRANSPOSED_A ? 128 : 2), b + k * (TRANSPOSED_B ? 128 : 2),
                         add || k > 0, TRANSPOSED_A, TRANSPOSED_B);
}

}  // namespace on_cpu

template <int STEPS = 1, int TRANSPOSED_A = 0, int TRANSPOSED_B = 0, int N, class T>
void wgmma_start(float (&d)[N][4], unsigned long long a, unsigned long long b, T) {
    on_cpu::start_steps<T, STEPS, TRANSPOSED_A, TRANSPOSED_B>("wgmma_start", 8 * N, d[0], a, b, false);
}
template <int STEPS = 1, int TRANSPOSED_A = 0, int TRANSPOSED_B = 0, int N, class T>
void wgmma(float (&d)[N][4], unsigned long long a, unsigned long long b, T) {
    on_cpu::start_steps<T, STEPS, TRANSPOSED_A, TRANSPOSED_B>("wgmma", 8 * N, d[0], a, b, true);
}
template <int TRANSPOSED_B = 1, int N, class T>
void wgmma_start(float (&d)[N][4], const unsigned (&a)[4], unsigned long long b, T) {
    on_cpu::start_product<T>("wgmma_start", 8 * N, d[0], a, 0, b, false, false, TRANSPOSED_B && sizeof(T) > 1);
}
template <int TRANSPOSED_B = 1, int N, class T>
void wgmma(float (&d)[N][4], const unsigned (&a)[4], unsigned long long b, T) {
    on_cpu::start_product<T>("wgmma", 8 * N, d[0], a, 0, b, true, false, TRANSPOSED_B && sizeof(T) > 1);
}
