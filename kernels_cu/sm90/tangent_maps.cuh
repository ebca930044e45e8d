// Tensor maps of tangents, which a launch has where they are given.
#pragma once
#include "ptx/tma.cuh"

template <bool GIVEN>
struct QTangentMap {
    TensorMap tq;
};
template <bool GIVEN>
struct KTangentMap {
    TensorMap tk;
};
template <bool GIVEN>
struct VTangentMap {
    TensorMap tv;
};
template <bool GIVEN>
struct DOTangentMap {
    TensorMap tdout;
};
template <>
struct QTangentMap<false> {};
template <>
struct KTangentMap<false> {};
template <>
struct VTangentMap<false> {};
template <>
struct DOTangentMap<false> {};
