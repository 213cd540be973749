// The size of the workspaces between stages of attention, on every target.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "abi/check.hpp"

namespace catalog {

// The workspaces of a family.
struct Uses {
    bool o_acc, lse_acc, delta, dq_acc;
};

// False: a factor is negative, or the product does not fit.
inline bool bytes_of(std::initializer_list<std::int64_t> extents, std::int64_t& bytes) {
    bytes = sizeof(float);
    for (const std::int64_t extent : extents)
        if (extent < 0 || __builtin_mul_overflow(bytes, extent, &bytes)) return false;
    return true;
}

inline std::int64_t divide_up(std::int64_t length, std::int64_t part) { return (length + part - 1) / part; }

// `splits` are those that the kernel takes.
inline catalog_status dense_workspace(const catalog_args& args, Uses uses, std::int64_t splits,
                                      catalog_workspace& size) {
    std::int64_t rows, o_acc, lse_acc, dq_acc;
    size = {splits, 0, 0, 0, 0};
    const bool fits = bytes_of({args.nhead_q, args.tokens_q}, rows) &&
                      bytes_of({splits, args.nhead_q, args.tokens_q}, lse_acc) &&
                      bytes_of({splits, args.nhead_q, args.tokens_q, args.hdim_v}, o_acc) &&
                      bytes_of({splits, args.nhead_q, args.tokens_q, args.hdim_q}, dq_acc);
    if (!fits) return CATALOG_BAD_ARGUMENT;
    if (uses.o_acc) size.o_acc = o_acc;
    if (uses.lse_acc) size.lse_acc = lse_acc;
    if (uses.delta) size.delta = rows;
    if (uses.dq_acc) size.dq_acc = dq_acc;
    return CATALOG_OK;
}

}  // namespace catalog
