// Twin of ptx/ldmatrix.cuh.
#pragma once

namespace on_cpu {

struct MatrixRows {
    unsigned* r;
    unsigned address;
};

inline void load_matrices(const char* name, unsigned (&r)[4], unsigned address, bool transposed) {
    MatrixRows mine{r, address};
    together(name, mine, [&](MatrixRows** lanes) {
        for (int i = 0; i < 4; i++) {
            unsigned short matrix[8][8];
            for (int row = 0; row < 8; row++) memcpy(matrix[row], at(lanes[8 * i + row]->address, 16), 16);
            for (int l = 0; l < 32; l++) {
                int row = l / 4, col = l % 4 * 2;
                unsigned short low = transposed ? matrix[col][row] : matrix[row][col];
                unsigned short high = transposed ? matrix[col + 1][row] : matrix[row][col + 1];
                lanes[l]->r[i] = low | unsigned(high) << 16;
            }
        }
    });
}

}  // namespace on_cpu

inline void ldmatrix_x4(unsigned (&r)[4], unsigned address) { on_cpu::load_matrices("ldmatrix_x4", r, address, false); }
inline void ldmatrix_x4_transposed(unsigned (&r)[4], unsigned address) {
    on_cpu::load_matrices("ldmatrix_x4_transposed", r, address, true);
}
