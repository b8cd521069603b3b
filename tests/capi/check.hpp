// What tests in C++ share.
#pragma once
#include "check.h"

#include <crossrail.hpp>

#include <type_traits>

template <class T> constexpr bool is_handle() {
    return std::is_nothrow_move_constructible_v<T> && std::is_nothrow_move_assignable_v<T> &&
           !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T>;
}

// The failure of a call that fails.
template <class Call> crossrail::error failure_of(Call call) {
    try {
        call();
    } catch (const crossrail::error &error) {
        return error;
    }
    std::fprintf(stderr, "no failure\n");
    std::exit(1);
}
