// Which tensors a direction multiplies, and how the product sees them: C = A B.
#pragma once

namespace catalog::ck {

enum class Direction { forward, bwd_data, bwd_weight };

template <class Row, Direction direction = Row::direction>
struct Roles;

template <class Row>
struct Roles<Row, Direction::forward> {
    using A = typename Row::In;
    using B = typename Row::Weight;
    using C = typename Row::Out;
    static constexpr bool rows_a = true, rows_b = false;
};

template <class Row>
struct Roles<Row, Direction::bwd_data> {
    using A = typename Row::Out;
    using B = typename Row::Weight;
    using C = typename Row::In;
    static constexpr bool rows_a = true, rows_b = true;
};

template <class Row>
struct Roles<Row, Direction::bwd_weight> {
    using A = typename Row::Out;
    using B = typename Row::In;
    using C = typename Row::Weight;
    static constexpr bool rows_a = false, rows_b = true;
};

}  // namespace catalog::ck
