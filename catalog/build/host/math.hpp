// Functions of one float, as compiler builtins: reading <cmath> would take a twentieth of a row's compile time.
#pragma once

namespace catalog::host {

inline float exp(float x) { return __builtin_expf(x); }
inline float log(float x) { return __builtin_logf(x); }
inline float log1p(float x) { return __builtin_log1pf(x); }

}  // namespace catalog::host
