// Numbers of known size. NVRTC has no <cstdint> of its own.
#pragma once

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

static_assert(sizeof(u8) == 1 && sizeof(u32) == 4 && sizeof(u64) == 8, "sizes that the host assumes");
