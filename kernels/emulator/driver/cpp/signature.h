// A function's type as its calls see it: the size of the result, then of each parameter. A number that travels in a
// floating-point register is marked. Two functions of one signature can be called through each other's declarations.
#pragma once
#include <cstddef>
#include <string>
#include <type_traits>

namespace abi {

template <class T> std::string signature_of_value() {
    if constexpr (std::is_void_v<T>)
        return "0";
    else
        return (std::is_floating_point_v<T> ? "f" : "") + std::to_string(sizeof(T));
}

template <class Function> struct Signature;

template <class Result, class... Parameters> struct Signature<Result(Parameters...)> {
    static std::string text() {
        std::string parameters;
        ((parameters += (parameters.empty() ? "" : ",") + signature_of_value<Parameters>()), ...);
        return signature_of_value<Result>() + "(" + parameters + ")";
    }

    // The same, for the compiler.
    template <class Other> static constexpr bool is_that_of() {
        return Signature<Other>::template fits<Result, Parameters...>();
    }

    template <class Theirs, class... Others> static constexpr bool fits() {
        if constexpr (sizeof...(Others) != sizeof...(Parameters))
            return false;
        else
            return value_fits<Result, Theirs>() && (value_fits<Parameters, Others>() && ...);
    }

    template <class A, class B> static constexpr bool value_fits() {
        if constexpr (std::is_void_v<A> || std::is_void_v<B>)
            return std::is_void_v<A> == std::is_void_v<B>;
        else
            return sizeof(A) == sizeof(B) && std::is_floating_point_v<A> == std::is_floating_point_v<B>;
    }
};

} // namespace abi
