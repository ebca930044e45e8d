// One head of a sequence: where its rows lie, in memory and for the copy engine.
#pragma once
#include "attention/sequence.cuh"

// Query heads that share a head of K and V.
__device__ inline int group_of(const Params& p) { return p.heads_q / p.heads_k; }

struct Head : Sequence {
    int q, k;  // which head of Q, and which of K and V

    __device__ static Head of(const Params& p, int batch, int q, int k) { return {{batch}, q, k}; }
    // By the head of Q, or by that of K and V with the first of the heads that share it.
    __device__ static Head of_q(const Params& p, int batch, int q) { return {{batch}, q, q / group_of(p)}; }
    __device__ static Head of_k(const Params& p, int batch, int k) { return {{batch}, k * group_of(p), k}; }
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

    // Where query i has its number in an array (B, Hq, Sq): lse, dlse, delta. And key j in one (B, Hk, Sk).
    __device__ long long row_number(const Params& p, int i = 0) const { return query_number(p, q, i); }
    __device__ long long key_row_number(const Params& p, int j = 0) const { return key_number(p, k, j); }

    // The same for the copy engine, from a column on: in a map of an input, and in that of a result.
    __device__ InMap at_query(const Params& p, int i, int column = 0) const { return {mapped_query(p, i), q, batch, column}; }
    __device__ InMap at_key(const Params& p, int j, int column = 0) const { return {mapped_key(p, j), k, batch, column}; }
    __device__ InMap to_query(int i, int column = 0) const { return {query_at(i), q, batch, column}; }
    __device__ InMap to_key(int j, int column = 0) const { return {key_at(j), k, batch, column}; }
    // In that of an array whose rows keys lie along.
    __device__ InMap at_turned_key(int j) const { return {0, k, batch, j}; }
    // In that of an array over pairs, which has one entry along an axis that it is broadcast along.
    __device__ InMap at_pair(const PairStrides& strides, int i, int j) const {
        return {i, strides.head ? q : 0, strides.batch ? batch : 0, j};
    }
};
