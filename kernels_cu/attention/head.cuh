// One head of a sequence: where its rows lie, in memory and for the copy engine.
#pragma once
#include "attention/sequence.cuh"

// Query heads that share a head of K and V.
__device__ inline int group_of(const Params& p) { return p.heads_q / p.heads_k; }

struct Head : Sequence {
    int q, k;  // which head of Q, and which of K and V

    __device__ static Head of(const Params& p, int batch, int q, int k) {
        if constexpr (!RAGGED) return {{{}, batch}, q, k};  // (a call more, and code is laid out otherwise)
        return {Sequence::of<true>(p, batch), q, k};
    }
    // By the head of Q, or by that of K and V with the first of the heads that share it.
    __device__ static Head of_q(const Params& p, int batch, int q) {
        if constexpr (!RAGGED) return {{{}, batch}, q, q / group_of(p)};
        return {Sequence::of<true>(p, batch), q, q / group_of(p)};
    }
    __device__ static Head of_k(const Params& p, int batch, int k) {
        if constexpr (!RAGGED) return {{{}, batch}, k * group_of(p), k};
        return {Sequence::of<false>(p, batch), k * group_of(p), k};
    }
    // The same of packed sequences, where the rows are known.
    __device__ static Head of_packed_q(const Params& p, const Packed& at, int q) {
        return {Sequence::of<true>(p, at.n, at.rows), q, q / group_of(p)};
    }
    __device__ static Head of_packed_q(const Params& p, const Packed& at, Range keys, int q) {
        return {Sequence::of<true>(p, at.n, at.rows, keys), q, q / group_of(p)};
    }
    __device__ static Head of_packed_k(const Params& p, const Packed& at, int k) {
        return {Sequence::of<false>(p, at.n, at.rows), k * group_of(p), k};
    }
    // The same from what a thread that made it tells of it.
    __device__ static Head told(const Params& p, int n, int q, int k, Range rows_q, Range rows_k) {
        return {{Lengths<RAGGED>::of(n, rows_q, rows_k), min(n, p.batch - 1)}, q, k};
    }
    // Another head of Q that shares K and V with it.
    __device__ Head other(int q) const { return {*this, q, k}; }

    // Row i of an array that has rows for queries (Q, O, dO, dQ), row j of one that has rows for keys (K, V, dK, dV).
    template <class T>
    __device__ T* query_row(T* array, const Strides& strides, int i = 0) const {
        return array + batch * strides.batch + q * strides.head + query_at(i) * strides.row;
    }
    template <class T>
    __device__ T* key_row(T* array, const Strides& strides, int j = 0) const {
        return array + batch * strides.batch + k * strides.head + key_at(j) * strides.row;
    }

    // Which page of K and V in pages has row j; -1: none.
    template <class Given>
    __device__ int page_of(const Given& p, int j) const {
        long long page = p.page_table[batch * p.page_table_strides.batch + j / p.page];
        return page < 0 || page >= p.pages ? -1 : int(page);
    }
    // The row there of one array, in `pool`; null for a page that is none.
    template <class Given, class T>
    __device__ T* paged_row(const Given& p, T* pool, const Strides& strides, int j) const {
        int page = page_of(p, j);
        return page < 0 ? nullptr : pool + page * strides.batch + k * strides.head + j % p.page * strides.row;
    }

    // Where query i has its number in an array (B, Hq, Sq): lse, dlse, delta. And key j in one (B, Hk, Sk).
    __device__ long long row_number(const Params& p, int i = 0) const { return query_number(p, q, i); }
    __device__ long long key_row_number(const Params& p, int j = 0) const { return key_number(p, k, j); }

    // Packed arrays have one entry for all sequences.
    __device__ int entry_q() const { return config::PACKED_Q ? 0 : batch; }
    __device__ int entry_k() const { return config::PACKED_K ? 0 : batch; }
    // The same for the copy engine, from a column on: in a map of an input, and in that of a result.
    __device__ InMap at_query(const Params& p, int i, int column = 0) const {
        return {mapped_query(p, i), q, entry_q(), column};
    }
    __device__ InMap at_key(const Params& p, int j, int column = 0) const {
        return {mapped_key(p, j), k, entry_k(), column};
    }
    // Of pages, whose rows behind the end may be asked for, too. What is no page lies outside of the map.
    __device__ InMap in_page(int row, int page) const { return {row, k, page, 0}; }
    template <class Given>
    __device__ InMap at_paged_key(const Given& p, int j) const {
        return in_page(j % p.page, j < keys(p) ? page_of(p, j) : -1);
    }
    __device__ InMap to_query(int i, int column = 0) const { return {query_at(i), q, entry_q(), column}; }
    __device__ InMap to_key(int j, int column = 0) const { return {key_at(j), k, entry_k(), column}; }
    // In that of an array whose rows keys lie along.
    __device__ InMap at_turned_key(int j) const { return {0, k, batch, j}; }
    // In that of an array over pairs, which has one entry along an axis that it is broadcast along.
    template <bool BY_LINE = false>
    __device__ InMap at_pair(const PairStrides& strides, int i, int j) const {
        return {BY_LINE ? query_at(i) : i, strides.head ? q : 0, strides.batch ? batch : 0, j};
    }
};
