// Whether a row pads its sequences and head dims, as the headers of CK ask.
#pragma once

namespace catalog::ck {

template <class Row>
struct Pads {
    static constexpr bool s = Row::pad_s > 0, sk = Row::pad_sk > 0, d = Row::pad_d > 0, dv = Row::pad_dv > 0;
};

}  // namespace catalog::ck
