// Sets of ranks: a word for up to 64, which is all that shapes of so few are compiled with; else several.
#pragma once

#include "layout/types.cuh"

template <u32 WORDS>
struct ManyRanks {
    u64 word[WORDS];

    ManyRanks() = default;

    // Those of the first word.
    __device__ __forceinline__ ManyRanks(u64 first) : word{first} {}

    // A set with the word that `of` gives for each.
    template <typename Of>
    static __device__ __forceinline__ ManyRanks of_words(Of of) {
        ManyRanks all = 0;
#pragma unroll
        for (u32 i = 0; i < WORDS; ++i) all.word[i] = of(i);
        return all;
    }

    // 64 ranks from `rank` on.
    __device__ __forceinline__ u64 operator>>(u32 rank) const {
        u32 i = rank / 64, by = rank % 64;
        u64 next = by != 0 && i + 1 < WORDS ? word[i + 1] << (64 - by) : 0;
        return word[i] >> by | next;
    }

    __device__ __forceinline__ ManyRanks operator~() const {
        return of_words([&](u32 i) { return ~word[i]; });
    }
    __device__ __forceinline__ ManyRanks operator&(const ManyRanks &other) const {
        return of_words([&](u32 i) { return word[i] & other.word[i]; });
    }
    __device__ __forceinline__ ManyRanks &operator|=(const ManyRanks &other) {
        return *this = of_words([&](u32 i) { return word[i] | other.word[i]; });
    }
    __device__ __forceinline__ explicit operator bool() const {
        u64 any = 0;
#pragma unroll
        for (u32 i = 0; i < WORDS; ++i) any |= word[i];
        return any != 0;
    }
    __device__ __forceinline__ bool operator==(const ManyRanks &other) const {
        bool alike = true;
#pragma unroll
        for (u32 i = 0; i < WORDS; ++i) alike = alike && word[i] == other.word[i];
        return alike;
    }
};

template <u32 WORDS>
struct RanksOf {
    using Type = ManyRanks<WORDS>;

    // 32 ranks, the `part`-th, by their bits.
    static __device__ __forceinline__ Type part(u32 part, u32 bits) {
        return Type::of_words([&](u32 i) { return part / 2 == i ? u64(bits) << (part % 2 * 32) : 0; });
    }
};
template <>
struct RanksOf<1> {
    using Type = u64;

    static __device__ __forceinline__ u64 part(u32 part, u32 bits) { return u64(bits) << (part * 32); }
};
using RankSets = RanksOf<(EP_R + 63) / 64>;
using Ranks = RankSets::Type;

// Adds a rank to a set in shared memory, to which other threads add ranks.
__device__ __forceinline__ void share_rank(u64 &ranks, u32 rank) { atomicOr(&ranks, u64(1) << rank); }
template <u32 WORDS>
__device__ __forceinline__ void share_rank(ManyRanks<WORDS> &ranks, u32 rank) {
    atomicOr(&ranks.word[rank / 64], u64(1) << rank % 64);
}
