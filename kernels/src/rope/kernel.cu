// cos[r][i] = float(cos(angle)) * factor and sin alike, angle = float(positions[r]) * frequencies[i] in float.
//
// Mapping: a thread per angle. Reads 8 and writes 8 bytes an angle for some forty operations in double: once per step
// and at most some megabytes, so written for brevity. Has not yet run on a card.
//
// Accuracy: sine and cosine are right to 2^-49 before they are rounded to float, whatever the position. So are the
// CPU's, and the two round to different floats only where both lie that close to the middle between two, one angle in
// some 2^24; then they are neighbours. `sincosf` is as good, but keeps a table in local memory.
#include "prelude.cuh"

// The angle less the nearest multiple of pi/2, and which multiple of four that was.
struct Reduced {
    double rest;
    u32 quadrant;
};

DEVICE Reduced reduce(double angle) {
    // pi/2 in two parts, each the nearest double: what is left out is below 2^-108, times a multiple below 2^32.
    constexpr double HIGH = 1.5707963267948966, LOW = 6.123233995736766e-17;
    double multiple = rint(angle * 0.6366197723675814);
    // `fma` rounds once, so the first difference is exact to 2^-53 of itself however much cancels.
    double rest = fma(-multiple, LOW, fma(-multiple, HIGH, angle));
    return {rest, (u32)(i64)multiple % 4};
}

// Taylor's sums up to x^17 and x^16: for |x| <= pi/4, what is left out is below 2^-62 and 2^-58 of the result.
DEVICE double sine(double x) {
    double s = x * x;
    double sum = fma(s, 1.0 / 355687428096000, -1.0 / 1307674368000);
    sum = fma(s, sum, 1.0 / 6227020800);
    sum = fma(s, sum, -1.0 / 39916800);
    sum = fma(s, sum, 1.0 / 362880);
    sum = fma(s, sum, -1.0 / 5040);
    sum = fma(s, sum, 1.0 / 120);
    sum = fma(s, sum, -1.0 / 6);
    return fma(x * s, sum, x);
}

DEVICE double cosine(double x) {
    double s = x * x;
    double sum = fma(s, 1.0 / 20922789888000, -1.0 / 87178291200);
    sum = fma(s, sum, 1.0 / 479001600);
    sum = fma(s, sum, -1.0 / 3628800);
    sum = fma(s, sum, 1.0 / 40320);
    sum = fma(s, sum, -1.0 / 720);
    sum = fma(s, sum, 1.0 / 24);
    sum = fma(s, sum, -0.5);
    return fma(s, sum, 1.0);
}

KERNEL(rope_angles, 128, 8,
       (const u32* __restrict__ positions, const float* __restrict__ frequencies, float factor,
        float* __restrict__ cos_out, float* __restrict__ sin_out, u32 rows, u32 half)) {
    u32 pair = blockIdx.x * blockDim.x + threadIdx.x;
    if (pair >= half) return;
    for (u32 row = blockIdx.y; row < rows; row += gridDim.y) {
        Reduced angle = reduce((float)positions[row] * frequencies[pair]);
        double s = sine(angle.rest), c = cosine(angle.rest);
        bool swapped = angle.quadrant % 2 == 1;
        double sin_value = swapped ? c : s, cos_value = swapped ? s : c;
        if (angle.quadrant >= 2) sin_value = -sin_value;
        if (angle.quadrant == 1 || angle.quadrant == 2) cos_value = -cos_value;
        sin_out[(u64)row * half + pair] = (float)sin_value * factor;
        cos_out[(u64)row * half + pair] = (float)cos_value * factor;
    }
}
