// Fixed-width integers without a header of the host: NVRTC compiles these files alone.
#pragma once
#ifdef __CUDACC_RTC__
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
#else
#include <cstdint>
#endif
