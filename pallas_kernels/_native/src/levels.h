// Codes to positions in [0, 1] and back: section 3 of the wire format, and
// `pallas_kernels.codec.levels`.

#ifndef DYNAMIQ_LEVELS_H_
#define DYNAMIQ_LEVELS_H_

#include "floats.h"
#include "kernels.h"

namespace dynamiq {
namespace {

// f(code) = code * step.
struct Uniform : UniformLevels {
  float position(float code) const { return code * step; }
  float above(float code, float t) const { return fma(code, step, -t); }
  float inverse(float t) const { return fma(t, top, -shift); }
  float gap(float) const { return first_gap; }
};

// f(code) = code * (linear + quadratic * code).
struct Quadratic : QuadraticLevels {
  float slope(float code) const { return fma(code, quadratic, linear); }
  float position(float code) const { return code * slope(code); }  // rounds twice, with `slope`
  float above(float code, float t) const { return fma(code, slope(code), -t); }
  float inverse(float t) const { return __builtin_sqrtf(fma(t, span, square)) - shift; }
  float gap(float code) const { return fma(code, growth, first_gap); }
};

// Rounds a position to the level below or above: up if the offset times the gap is less than what
// lies above the lower level.
template <class Levels>
inline uint32_t round_to_level(float t, float offset, const Levels& levels, uint32_t top) {
  constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: a sum with it is rounded to a whole number
  const float shifted = levels.inverse(t) + kWhole;
  const float code = shifted - kWhole;
  const float missing = fma(levels.gap(code), offset, levels.above(code, t));
  return (bits_of(shifted) + (bits_of(missing) >> 31)) & top;
}

}  // namespace
}  // namespace dynamiq

#endif  // DYNAMIQ_LEVELS_H_
