// SPDX-License-Identifier: Apache-2.0
#pragma once
// Measured results for devices (device_bits.h). tests/device/measure_bits.py writes such a table on a device.

#include <array>
#include <string_view>

namespace penstock::graph {

inline constexpr std::array<std::string_view, 1> kDeviceBitsTables = {
    R"table(penstock-device-bits 1
device cuda
measured "NVIDIA H200 against an Intel Xeon, torch 2.11.0+cu130; by family of operators, 393 cases and OpInfo's 1,451"
equal _to_copy(T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=uint8) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=uint8,memory_format=channels_last) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=uint8,memory_format=preserve_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=uint8,memory_format=contiguous_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=int8) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=int8,memory_format=channels_last) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=int8,memory_format=preserve_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=int8,memory_format=contiguous_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=int16) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=int16,memory_format=channels_last) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=int16,memory_format=preserve_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=int16,memory_format=contiguous_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=int32) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=int32,memory_format=channels_last) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=int32,memory_format=preserve_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=int32,memory_format=contiguous_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=int64) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=int64,memory_format=channels_last) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=int64,memory_format=preserve_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=int64,memory_format=contiguous_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=bool) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=bool,memory_format=channels_last) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=bool,memory_format=preserve_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=bool,memory_format=contiguous_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=float32) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=float32,memory_format=channels_last) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=float32,memory_format=preserve_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=float32,memory_format=contiguous_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=float64) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=float64,memory_format=channels_last) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=float64,memory_format=preserve_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=float64,memory_format=contiguous_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=float16) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=float16,memory_format=channels_last) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=float16,memory_format=preserve_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=float16,memory_format=contiguous_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=bfloat16) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=bfloat16,memory_format=channels_last) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=bfloat16,memory_format=preserve_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,dtype=bfloat16,memory_format=contiguous_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,memory_format=channels_last) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal clone(T,memory_format=channels_last) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,memory_format=preserve_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal clone(T,memory_format=preserve_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _to_copy(T,memory_format=contiguous_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal clone(T,memory_format=contiguous_format) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal clone(T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal detach(T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal view(T,[i...]) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _unsafe_view(T,[i...]) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal _reshape_alias(T,[i...],[i...]) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal expand(T,[i...]) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal permute(T,[i...]) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal transpose.int(T,i,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal t(T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal unsqueeze(T,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal squeeze(T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal squeeze.dim(T,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal squeeze.dims(T,[i...]) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal slice.Tensor(T,i,i,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal slice.Tensor(T,i,i,i,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal slice.Tensor(T,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal slice.Tensor(T,i,none,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal select.int(T,i,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal split.Tensor(T,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal split.Tensor(T,i,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal split_with_sizes(T,[i...],i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal split_with_sizes(T,[i...]) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal unbind.int(T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal unbind.int(T,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal unfold(T,i,i,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal as_strided(T,[i...],[i...]) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal as_strided(T,[i...],[i...],i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal diagonal(T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal diagonal(T,i,i,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal cat([T...]) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal cat([T...],i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal stack([T...]) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal stack([T...],i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal flip(T,[i...]) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal roll(T,[i...]) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal roll(T,[i...],[i...]) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal repeat(T,[i...]) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal constant_pad_nd(T,[i...]) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal constant_pad_nd(T,[i...],i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal constant_pad_nd(T,[i...],f) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal gather(T,i,int64) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal index_select(T,i,int64) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal index.Tensor(T,[int64...]) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal index.Tensor(T,[none,int64]) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal embedding(T,int64) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal masked_fill.Scalar(T,bool,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal masked_fill.Scalar(T,bool,f) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal where.self(bool,T,T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal where.ScalarOther(bool,T,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal where.ScalarOther(bool,T,f) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal where.ScalarSelf(bool,i,T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal where.ScalarSelf(bool,f,T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal tril(T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal triu(T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal tril(T,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal triu(T,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal zeros_like(T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal ones_like(T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal full_like(T,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal full_like(T,f) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal reflection_pad1d(T,[i...]) float32 float64 float16 bfloat16
equal reflection_pad2d(T,[i...]) float32 float64 float16 bfloat16
equal replication_pad1d(T,[i...]) float32 float64 float16 bfloat16
equal replication_pad2d(T,[i...]) float32 float64 float16 bfloat16
equal eq.Tensor(T,T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal eq.Scalar(T,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal eq.Scalar(T,f) float32 float64 float16 bfloat16
equal ne.Tensor(T,T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal ne.Scalar(T,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal ne.Scalar(T,f) float32 float64 float16 bfloat16
equal lt.Tensor(T,T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal lt.Scalar(T,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal lt.Scalar(T,f) float32 float64 float16 bfloat16
equal le.Tensor(T,T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal le.Scalar(T,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal le.Scalar(T,f) float32 float64 float16 bfloat16
equal gt.Tensor(T,T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal gt.Scalar(T,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal gt.Scalar(T,f) float32 float64 float16 bfloat16
equal ge.Tensor(T,T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal ge.Scalar(T,i) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal ge.Scalar(T,f) float32 float64 float16 bfloat16
equal isnan(T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal logical_not(T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal logical_and(T,T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal logical_or(T,T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal logical_xor(T,T) uint8 int8 int16 int32 int64 bool float32 float64 float16 bfloat16
equal add.Tensor(T,T) uint8 int8 int16 int32 int64 float32 float64
equal add.Scalar(T,i) uint8 int8 int16 int32 int64 float32 float64
equal add.Scalar(T,f) uint8 int8 int16 int32 int64 float32 float64
equal sub.Tensor(T,T) uint8 int8 int16 int32 int64 float32 float64
equal sub.Scalar(T,i) uint8 int8 int16 int32 int64 float32 float64
equal sub.Scalar(T,f) uint8 int8 int16 int32 int64 float32 float64
equal mul.Tensor(T,T) uint8 int8 int16 int32 int64 float32 float64
equal mul.Scalar(T,i) uint8 int8 int16 int32 int64 float32 float64
equal mul.Scalar(T,f) uint8 int8 int16 int32 int64 float32 float64
equal mul.Tensor(T,T) float16 bfloat16
equal add.Tensor(T,T) float16 bfloat16
equal sub.Tensor(T,T) float16 bfloat16
equal add.Tensor(T,T,alpha=i) uint8 int8 int16 int32 int64 float32 float64
equal add.Tensor(T,T,alpha=f) float32 float64
differs add.Scalar(T,f) float16 bfloat16
differs add.Scalar(T,i) float16 bfloat16
equal sub.Tensor(T,T,alpha=i) uint8 int8 int16 int32 int64 float32 float64
equal sub.Tensor(T,T,alpha=f) float32 float64
differs sub.Scalar(T,f) float16 bfloat16
differs sub.Scalar(T,i) float16 bfloat16
equal rsub.Scalar(T,i) uint8 int8 int16 int32 int64 float32 float64
equal rsub.Scalar(T,f) float32 float64
equal div.Tensor(T,T) float32 float64
reciprocal div.Scalar(T,i) float32 uint8 int8 int16 int32 int64
reciprocal div.Scalar(T,f) float32 uint8 int8 int16 int32 int64
equal remainder.Tensor(T,T) uint8 int8 int16 int32 int64 float32
equal remainder.Scalar(T,i) uint8 int8 int16 int32 int64 float32
equal remainder.Scalar(T,f) float32
equal fmod.Tensor(T,T) uint8 int8 int16 int32 int64 float32
equal fmod.Scalar(T,i) uint8 int8 int16 int32 int64 float32
equal fmod.Scalar(T,f) float32
equal floor_divide(T,T) uint8 int8 int16 int32 int64 float32
equal floor_divide.Scalar(T,i) uint8 int8 int16 int32 int64
equal neg(T) uint8 int8 int16 int32 int64 float32
equal abs(T) uint8 int8 int16 int32 int64 float32
equal sign(T) uint8 int8 int16 int32 int64 float32
equal floor(T) float32
equal ceil(T) float32
equal round(T) float32
equal trunc(T) float32
equal frac(T) float32
equal reciprocal(T) float32
equal square(T) float32
equal square(T) uint8 int8 int16 int32 int64
equal pow.Tensor_Scalar(T,i) uint8 int8 int16 int32 int64
equal bitwise_and.Tensor(T,T) uint8 int8 int16 int32 int64 bool
equal bitwise_and.Scalar(T,i) uint8 int8 int16 int32 int64 bool
equal bitwise_or.Tensor(T,T) uint8 int8 int16 int32 int64 bool
equal bitwise_or.Scalar(T,i) uint8 int8 int16 int32 int64 bool
equal bitwise_xor.Tensor(T,T) uint8 int8 int16 int32 int64 bool
equal bitwise_xor.Scalar(T,i) uint8 int8 int16 int32 int64 bool
equal bitwise_not(T) uint8 int8 int16 int32 int64 bool
equal bitwise_left_shift.Tensor(T,T) uint8 int8 int16 int32 int64
equal bitwise_left_shift.Tensor_Scalar(T,i) uint8 int8 int16 int32 int64
equal bitwise_right_shift.Tensor(T,T) uint8 int8 int16 int32 int64
equal bitwise_right_shift.Tensor_Scalar(T,i) uint8 int8 int16 int32 int64
equal __lshift__.Scalar(T,i) uint8 int8 int16 int32 int64
equal __rshift__.Scalar(T,i) uint8 int8 int16 int32 int64
equal maximum(T,T) uint8 int8 int16 int32 int64 float32
equal minimum(T,T) uint8 int8 int16 int32 int64 float32
equal clamp(T,i) uint8 int8 int16 int32 int64 float32
equal clamp(T,i,i) uint8 int8 int16 int32 int64 float32
equal clamp(T,none,i) uint8 int8 int16 int32 int64 float32
equal clamp_min(T,i) uint8 int8 int16 int32 int64 float32
equal clamp_max(T,i) uint8 int8 int16 int32 int64 float32
equal clamp(T,f) float32
equal clamp(T,f,f) float32
equal clamp(T,none,f) float32
equal clamp_min(T,f) float32
equal clamp_max(T,f) float32
equal copysign.Tensor(T,T) float32
equal lerp.Scalar(T,T,f) float32
equal lerp.Tensor(T,T,T) float32
equal nan_to_num(T) float32
equal nan_to_num(T,f) float32
equal nan_to_num(T,f,f,f) float32
equal nan_to_num(T,i) float32
equal nan_to_num(T,i,i,i) float32
equal bucketize.Tensor(T,T) uint8 int8 int16 int32 int64 float32
equal bucketize.Tensor(T,T,out_int32=true) uint8 int8 int16 int32 int64 float32
equal bucketize.Tensor(T,T,right=true) uint8 int8 int16 int32 int64 float32
equal bucketize.Tensor(T,T,out_int32=true,right=true) uint8 int8 int16 int32 int64 float32
equal bucketize.Tensor(T,T,out_int32=false,right=false) uint8 int8 int16 int32 int64 float32
equal bucketize.Tensor(T,T,right=false) uint8 int8 int16 int32 int64 float32
equal searchsorted.Tensor(T,T) uint8 int8 int16 int32 int64 float32
equal searchsorted.Tensor(T,T,right=true) uint8 int8 int16 int32 int64 float32
equal isin.Tensor_Tensor(T,T) uint8 int8 int16 int32 int64
equal argmax(T) float32
equal argmin(T) float32
equal amax(T,[i...]) float32 uint8 int8 int16 int32 int64
equal amin(T,[i...]) float32 uint8 int8 int16 int32 int64
equal amax(T,[i...],true) float32 uint8 int8 int16 int32 int64
equal amin(T,[i...],true) float32 uint8 int8 int16 int32 int64
equal sum(T) uint8 int8 int16 int32 int64 bool
equal sum.dim_IntList(T,[i...]) uint8 int8 int16 int32 int64 bool
equal sum.dim_IntList(T,[i...],true) uint8 int8 int16 int32 int64 bool
equal cumsum(T,i) uint8 int8 int16 int32 int64
equal one_hot(int64,i)
equal scatter.value(T,i,int64,i) uint8 int8 int16 int32 int64 bool float32
equal max_pool2d_with_indices(T,[i...],[i...]) float32
equal max_pool2d_with_indices(T,[i...]) float32
equal max_pool2d_with_indices(T,[i...],[i...],[i...]) float32
equal avg_pool2d(T,[i...],[i...]) float32
equal avg_pool2d(T,[i...]) float32
equal _adaptive_avg_pool2d(T,[i...]) float32
equal upsample_nearest2d(T,[i...]) float32 uint8
equal upsample_nearest2d(T,[i...],none,none) float32 uint8
equal upsample_nearest2d(T,[i...],f,f) float32 uint8
equal upsample_nearest2d.vec(T,[i...],none) float32 uint8
equal upsample_nearest2d.vec(T,none,[f...]) float32 uint8
equal _upsample_nearest_exact2d(T,[i...]) float32 uint8
equal _upsample_nearest_exact2d(T,[i...],none,none) float32 uint8
equal _upsample_nearest_exact2d(T,[i...],f,f) float32 uint8
equal _upsample_nearest_exact2d.vec(T,[i...],none) float32 uint8
equal _upsample_nearest_exact2d.vec(T,none,[f...]) float32 uint8
equal upsample_bilinear2d(T,[i...],true) float32
equal upsample_bilinear2d(T,[i...],true,none,none) float32
equal upsample_bilinear2d(T,[i...],true,f,f) float32
equal upsample_bilinear2d.vec(T,[i...],true,none) float32
equal upsample_bilinear2d.vec(T,none,true,[f...]) float32
differs _upsample_bilinear2d_aa(T,[i...],true) float32
differs _upsample_bilinear2d_aa(T,[i...],true,none,none) float32
differs _upsample_bilinear2d_aa(T,[i...],true,f,f) float32
differs _upsample_bilinear2d_aa.vec(T,[i...],true,none) float32
differs _upsample_bilinear2d_aa.vec(T,none,true,[f...]) float32
differs upsample_bicubic2d(T,[i...],true) float32
differs upsample_bicubic2d(T,[i...],true,none,none) float32
differs upsample_bicubic2d(T,[i...],true,f,f) float32
differs upsample_bicubic2d.vec(T,[i...],true,none) float32
differs upsample_bicubic2d.vec(T,none,true,[f...]) float32
differs _upsample_bicubic2d_aa(T,[i...],true) float32
differs _upsample_bicubic2d_aa(T,[i...],true,none,none) float32
differs _upsample_bicubic2d_aa(T,[i...],true,f,f) float32
differs _upsample_bicubic2d_aa.vec(T,[i...],true,none) float32
differs _upsample_bicubic2d_aa.vec(T,none,true,[f...]) float32
equal upsample_bilinear2d(T,[i...],false) float32
equal upsample_bilinear2d(T,[i...],false,none,none) float32
equal upsample_bilinear2d(T,[i...],false,f,f) float32
equal upsample_bilinear2d.vec(T,[i...],false,none) float32
equal upsample_bilinear2d.vec(T,none,false,[f...]) float32
differs _upsample_bilinear2d_aa(T,[i...],false) float32
differs _upsample_bilinear2d_aa(T,[i...],false,none,none) float32
differs _upsample_bilinear2d_aa(T,[i...],false,f,f) float32
differs _upsample_bilinear2d_aa.vec(T,[i...],false,none) float32
differs _upsample_bilinear2d_aa.vec(T,none,false,[f...]) float32
differs upsample_bicubic2d(T,[i...],false) float32
differs upsample_bicubic2d(T,[i...],false,none,none) float32
differs upsample_bicubic2d(T,[i...],false,f,f) float32
differs upsample_bicubic2d.vec(T,[i...],false,none) float32
differs upsample_bicubic2d.vec(T,none,false,[f...]) float32
differs _upsample_bicubic2d_aa(T,[i...],false) float32
differs _upsample_bicubic2d_aa(T,[i...],false,none,none) float32
differs _upsample_bicubic2d_aa(T,[i...],false,f,f) float32
differs _upsample_bicubic2d_aa.vec(T,[i...],false,none) float32
differs _upsample_bicubic2d_aa.vec(T,none,false,[f...]) float32
equal full([i...],i,dtype=uint8)
equal full([i...],f,dtype=uint8)
equal zeros([i...],dtype=uint8)
equal ones([i...],dtype=uint8)
equal full([i...],i,dtype=int8)
equal full([i...],f,dtype=int8)
equal zeros([i...],dtype=int8)
equal ones([i...],dtype=int8)
equal full([i...],i,dtype=int16)
equal full([i...],f,dtype=int16)
equal zeros([i...],dtype=int16)
equal ones([i...],dtype=int16)
equal full([i...],i,dtype=int32)
equal full([i...],f,dtype=int32)
equal zeros([i...],dtype=int32)
equal ones([i...],dtype=int32)
equal full([i...],i,dtype=int64)
equal full([i...],f,dtype=int64)
equal zeros([i...],dtype=int64)
equal ones([i...],dtype=int64)
equal full([i...],i,dtype=bool)
equal full([i...],f,dtype=bool)
equal zeros([i...],dtype=bool)
equal ones([i...],dtype=bool)
equal full([i...],i,dtype=float32)
equal full([i...],f,dtype=float32)
equal zeros([i...],dtype=float32)
equal ones([i...],dtype=float32)
equal full([i...],i,dtype=float64)
equal full([i...],f,dtype=float64)
equal zeros([i...],dtype=float64)
equal ones([i...],dtype=float64)
equal full([i...],i,dtype=float16)
equal full([i...],f,dtype=float16)
equal zeros([i...],dtype=float16)
equal ones([i...],dtype=float16)
equal full([i...],i,dtype=bfloat16)
equal full([i...],f,dtype=bfloat16)
equal zeros([i...],dtype=bfloat16)
equal ones([i...],dtype=bfloat16)
differs exp(T) float32
differs exp2(T) float32
differs expm1(T) float32
differs log(T) float32
differs log2(T) float32
differs log10(T) float32
differs log1p(T) float32
differs sin(T) float32
differs cos(T) float32
differs tan(T) float32
differs tanh(T) float32
differs sigmoid(T) float32
differs erf(T) float32
differs atan(T) float32
differs asin(T) float32
differs lgamma(T) float32
differs softplus(T) float32
differs gelu(T) float32
differs silu(T) float32
differs hardswish(T) float32
differs sqrt(T) float32
differs rsqrt(T) float32
equal exp(T) float16 bfloat16
equal log(T) float16 bfloat16
equal sin(T) float16 bfloat16
equal cos(T) float16 bfloat16
equal tan(T) float16 bfloat16
equal tanh(T) float16 bfloat16
equal sqrt(T) float16 bfloat16
equal rsqrt(T) float16 bfloat16
equal sigmoid(T) bfloat16
differs sum(T) float32
differs mean(T) float32
differs std(T) float32
differs sum.dim_IntList(T,[i...]) float32
differs mean.dim(T,[i...]) float32
differs mean.dim(T,[i...],true) float32
differs var.correction(T,[i...]) float32
differs std.correction(T,[i...]) float32
differs cumsum(T,i) float32
differs _softmax(T,i,false) float32
differs _log_softmax(T,i,false) float32
differs mm(T,T) float32
differs bmm(T,T) float32
differs addmm(T,T,T) float32
differs _fft_r2c(T,[i...],i,true) float32
differs _fft_c2r(T,[i...],i,i) float32
differs addcmul(T,T,T) float32
differs addcdiv(T,T,T) float32
differs grid_sampler_2d(T,T,i,i,true) float32
differs grid_sampler_2d(T,T,i,i,false) float32
)table"};

}  // namespace penstock::graph
