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

// A place in a map of windows (gpu/tensormap.py): entry n has the rows before row n, the last of which is row
// WINDOW - 1. What a box has from row WINDOW on is outside.
constexpr int WINDOW = 1 << 30;
struct InWindow {
    int row, head, entry, column;
};

// A place in a tensor map (ptx/tma.cuh).
struct InMap {
    int row, head, batch, column;

    __device__ InMap down(int rows, int columns = 0) const { return {row + rows, head, batch, column + columns}; }

    // The same in a map of windows, with `rows` more there from this one on.
    __device__ InWindow in_window(int rows) const { return {WINDOW - rows, head, row + rows, column}; }
};
