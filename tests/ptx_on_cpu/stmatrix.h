// Twin of ptx/stmatrix.cuh.
#pragma once

namespace on_cpu {

struct StoredRows {
    const unsigned* r;
    unsigned address;
};

inline void store_matrices(const char* name, int matrices, unsigned address, const unsigned* r, bool transposed) {
    StoredRows mine{r, address};
    together(name, mine, [&](StoredRows** lanes) {
        for (int i = 0; i < matrices; i++) {
            unsigned short matrix[8][8];
            for (int l = 0; l < 32; l++)
                for (int e = 0; e < 2; e++) {
                    int row = l / 4, col = l % 4 * 2 + e;
                    (transposed ? matrix[col][row] : matrix[row][col]) = (unsigned short)(lanes[l]->r[i] >> 16 * e);
                }
            for (int row = 0; row < 8; row++) memcpy(at(lanes[8 * i + row]->address, 16), matrix[row], 16);
        }
    });
}

}  // namespace on_cpu

inline void stmatrix_x4(unsigned address, const unsigned (&r)[4]) {
    on_cpu::store_matrices("stmatrix_x4", 4, address, r, false);
}
inline void stmatrix_x4_transposed(unsigned address, const unsigned (&r)[4]) {
    on_cpu::store_matrices("stmatrix_x4_transposed", 4, address, r, true);
}
inline void stmatrix_x2_transposed(unsigned address, unsigned r0, unsigned r1) {
    unsigned r[2] = {r0, r1};
    on_cpu::store_matrices("stmatrix_x2_transposed", 2, address, r, true);
}
