// SPDX-License-Identifier: Apache-2.0
#pragma once
// The element types that cross a process boundary. The codes are identical to c10::ScalarType's, so the rooms with
// torch cast without a table; this room has no torch, so the sizes are listed here. Loader and worker assert that both
// agree.

#include <cstdint>

namespace penstock::wire {

using DTypeCode = uint8_t;

constexpr DTypeCode kDTypeUInt8 = 0;
constexpr DTypeCode kDTypeFloat32 = 6;
constexpr DTypeCode kDTypeBool = 11;

// Bytes of one element, or 0 for a code that cannot be in the tensor table (Python pickles quantised and packed types
// instead).
constexpr uint32_t dtype_bytes(DTypeCode code) {
  switch (code) {
    case 0:   // uint8
    case 1:   // int8
    case 11:  // bool
    case 23:  // float8_e5m2
    case 24:  // float8_e4m3fn
    case 25:  // float8_e5m2fnuz
    case 26:  // float8_e4m3fnuz
      return 1;
    case 2:   // int16
    case 5:   // float16
    case 15:  // bfloat16
    case 27:  // uint16
      return 2;
    case 3:   // int32
    case 6:   // float32
    case 8:   // complex32
    case 28:  // uint32
      return 4;
    case 4:   // int64
    case 7:   // float64
    case 9:   // complex64
    case 29:  // uint64
      return 8;
    case 10:  // complex128
      return 16;
    default: return 0;
  }
}

}  // namespace penstock::wire
