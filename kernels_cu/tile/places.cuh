// Where rows of an array lie: for threads, and for TMA.
#pragma once

// Rows in memory, from one on.
template <class T>
struct Rows {
    T* from;
    long long stride;
    int count, columns;
};
template <class T>
Rows(T*, long long, int, int) -> Rows<T>;

// A place in a tensor map (ptx/tma.cuh).
struct InMap {
    int row, head, batch, column;

    __device__ InMap down(int rows, int columns = 0) const { return {row + rows, head, batch, column + columns}; }
};
