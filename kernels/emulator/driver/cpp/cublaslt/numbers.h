// Numbers of 16 bits, as devices convert them.
#pragma once
#include <bit>
#include <cstdint>

namespace lt {

inline float float_of_bf16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t(bits) << 16); }

// The nearest one, ties to even.
inline std::uint16_t bf16_of_float(float value) {
    auto bits = std::bit_cast<std::uint32_t>(value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
    return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float float_of_half(std::uint16_t bits) {
    std::uint32_t sign = std::uint32_t(bits & 0x8000) << 16;
    std::uint32_t magnitude = bits & 0x7FFF;
    if (magnitude >= 0x7C00) return std::bit_cast<float>(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
    // As a float of the same bits, shifted, it is too small by 2^112; this scales subnormal numbers, too.
    float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scaled) | sign);
}

// The nearest one, ties to even.
inline std::uint16_t half_of_float(float value) {
    auto bits = std::bit_cast<std::uint32_t>(value);
    auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
    std::uint32_t magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return 0x7FFF;
    // From half-way between the largest number and the next power of two on.
    if (magnitude >= 0x477FF000) return sign | 0x7C00;
    if (magnitude < 0x38800000) {
        // A subnormal one counts units of 2^-24, to which adding 0.5 rounds it.
        float rounded = std::bit_cast<float>(magnitude) + 0.5f;
        return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(rounded) - 0x3F000000));
    }
    std::uint32_t rounded = magnitude + 0xFFF + (magnitude >> 13 & 1);
    return static_cast<std::uint16_t>(sign | (rounded - 0x38000000) >> 13);
}

// What tensor cores read of a float: they leave out the last 13 bits.
inline float tf32_of_float(float value) {
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) & 0xFFFFE000);
}

} // namespace lt
