/* The arguments of RMS normalisation. Generated from the operation's list of fields; do not edit. */
#ifndef CATALOG_ARGS_H
#define CATALOG_ARGS_H

#include <stdint.h>

typedef struct catalog_tensor {
    void* data;
    int64_t stride_row;
} catalog_tensor;

typedef struct catalog_args {
    uint32_t struct_bytes; /* sizeof(catalog_args) as the caller compiled it */
    uint32_t abi_version; /* CATALOG_ABI_VERSION */

    catalog_tensor x; /* (rows, columns) */
    catalog_tensor gain; /* (columns) */
    catalog_tensor y; /* (rows, columns) */

    int64_t rows;
    int64_t columns;

    float eps; /* what is added to the mean of squares */
    int32_t num_threads; /* host targets: 0 = every core that the process may use */
    int32_t reserved; /* 0 */
} catalog_args;

/* Bytes that a launch uses of each workspace, 0 of one that it does not use. */
typedef struct catalog_workspace {
    int64_t num_splits; /* what args->num_splits must be for the launch */
} catalog_workspace;

#endif /* CATALOG_ARGS_H */
