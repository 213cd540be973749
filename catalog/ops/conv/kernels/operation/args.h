/* The arguments of a grouped convolution: output = input * weight, or one of its gradients. Generated from the
 * operation's list of fields; do not edit. */
#ifndef CATALOG_ARGS_H
#define CATALOG_ARGS_H

#include <stdint.h>

typedef struct catalog_tensor {
    void* data;
    int64_t stride_first; /* between images, or between the filters of output channels */
} catalog_tensor;

typedef struct catalog_args {
    uint32_t struct_bytes; /* sizeof(catalog_args) as the caller compiled it */
    uint32_t abi_version; /* CATALOG_ABI_VERSION */

    catalog_tensor input; /* (n, c, in); its gradient in backward data */
    catalog_tensor weight; /* (k, c / g, filter); its gradient in backward weight */
    catalog_tensor output; /* (n, k, out); its gradient in the backward directions */

    /* for depth, height and width: extents of input, output and filter, strides, dilations, padding */
    const int32_t* geometry;

    int64_t n; /* images */
    int64_t c; /* channels of the input */
    int64_t k; /* channels of the output */
    int64_t g; /* groups of channels */

    int32_t num_threads; /* host targets: 0 = every core that the process may use */
    int32_t reserved; /* 0 */
    struct catalog_pool* pool; /* host targets: the threads of the process; NULL = those of the library */
} catalog_args;

/* Bytes that a launch uses of each workspace, 0 of one that it does not use. */
typedef struct catalog_workspace {
    int64_t num_splits; /* what args->num_splits must be for the launch */
} catalog_workspace;

#endif /* CATALOG_ARGS_H */
