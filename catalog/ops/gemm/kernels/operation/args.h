/* The arguments of GEMM: C = f(alpha A B + beta C + bias), combined with D tensors; A and B may have scales.
 * Generated from the operation's list of fields; do not edit. */
#ifndef CATALOG_ARGS_H
#define CATALOG_ARGS_H

#include <stdint.h>

typedef struct catalog_tensor {
    void* data;
    int64_t stride_batch; /* between products of a batch */
    int64_t stride_outer; /* between rows, or between columns if the tensor is column-major */
} catalog_tensor;

enum catalog_activation {
    CATALOG_PASS_THROUGH = 0, /* f(x) = x */
    CATALOG_RELU = 1, /* max(x, 0) */
    CATALOG_GELU = 2, /* x Phi(x), with the normal distribution Phi */
    CATALOG_SILU = 3, /* x / (1 + exp(-x)) */
};

enum catalog_group_axis {
    CATALOG_GROUPS_OF_M = 0, /* rows of A and C; each group has its own B */
    CATALOG_GROUPS_OF_K = 1, /* columns of A and rows of B; each group has its own C */
};

typedef struct catalog_args {
    uint32_t struct_bytes; /* sizeof(catalog_args) as the caller compiled it */
    uint32_t abi_version; /* CATALOG_ABI_VERSION */

    /* Groups along an axis have no axis of the batch there. */
    catalog_tensor a; /* (batch, m, k) */
    catalog_tensor b; /* (batch, k, n) */
    catalog_tensor scale_a; /* (batch, m), or (batch, m, ceil(k / 128)); float32 */
    catalog_tensor scale_b; /* (batch, n), or (batch, ceil(n / 128), ceil(k / 128)); float32 */
    catalog_tensor bias; /* (n); NULL: none */
    catalog_tensor d0; /* (batch, m, n) */
    catalog_tensor d1; /* (batch, m, n) */
    catalog_tensor c; /* (batch, m, n); not read if beta is 0 */
    catalog_tensor c_acc; /* partial sums of C, or what else a kernel keeps in its workspace */

    const int32_t* starts; /* batch + 1 starts of groups along an axis, the last one is its extent; NULL: no groups */

    int64_t batch;
    int64_t m;
    int64_t n;
    int64_t k;
    int64_t num_splits; /* parts of the depth */

    float alpha;
    float beta;
    int32_t activation; /* catalog_activation: f */
    int32_t group_axis; /* catalog_group_axis */
    int32_t num_threads; /* host targets: 0 = every core that the process may use */
    int32_t reserved; /* 0 */
    struct catalog_pool* pool; /* host targets: the threads of the process; NULL = those of the library */
} catalog_args;

/* Bytes that a launch uses of each workspace, 0 of one that it does not use. */
typedef struct catalog_workspace {
    int64_t num_splits; /* what args->num_splits must be for the launch */
    int64_t c_acc;
} catalog_workspace;

#endif /* CATALOG_ARGS_H */
