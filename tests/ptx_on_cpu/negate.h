// Twin of ptx/negate.cuh.
#pragma once

inline void negate_below(float& x, unsigned word, unsigned below) {
    if (word < below) x = -x;
}
inline void negate_below(double& x, unsigned word, unsigned below) {
    if (word < below) x = -x;
}
