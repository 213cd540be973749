// The elements of Q, which a row may have apart from those of K and V, and of an elementwise bias.
#pragma once

#include <type_traits>

namespace catalog {

template <class Row, class = void>
struct QueriesOf {
    using type = typename Row::dtype;
};
template <class Row>
struct QueriesOf<Row, std::void_t<typename Row::qtype>> {
    using type = typename Row::qtype;
};

template <class Row>
using QueryElement = typename QueriesOf<Row>::type;

// Whether K and V have elements of 8 bits, and whether Q has, too: then it has factors where they have.
template <class Row>
inline constexpr bool has_bytes = sizeof(typename Row::dtype) == 1;

template <class Row>
inline constexpr bool has_query_bytes = sizeof(QueryElement<Row>) == 1;

// Of an elementwise bias: those of Q, or float where Q has 8 bits.
template <class Row>
using BiasElement = std::conditional_t<has_query_bytes<Row>, float, QueryElement<Row>>;

}  // namespace catalog
