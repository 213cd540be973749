/* What every kernel library of the catalog exports, on every target: two C functions and one argument struct.
 *
 * Strides are in elements. The innermost axis (head dim) of every tensor is contiguous. A tensor that a kernel does not
 * use has data == NULL. All pointers are in the memory of the device that the kernel runs on.
 */
#ifndef CATALOG_ABI_H
#define CATALOG_ABI_H

#include <stdint.h>

#define CATALOG_ABI_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif

typedef struct catalog_tensor {
    void* data;
    int64_t stride_batch; /* 0 in group mode: sequences lie one after the other along the token axis */
    int64_t stride_nhead;
    int64_t stride_seqlen;
} catalog_tensor;

enum catalog_status {
    CATALOG_OK           = 0,
    CATALOG_ABI_MISMATCH = 1, /* struct_bytes or abi_version differ from what the kernel was built with */
    CATALOG_BAD_ARGUMENT = 2, /* the call is outside of what this kernel was built for */
    CATALOG_NO_MEMORY    = 3, /* scratch memory could not be allocated */
};

enum catalog_mask_corner {
    CATALOG_TOP_LEFT     = 0, /* query i and key i are aligned */
    CATALOG_BOTTOM_RIGHT = 1, /* the last query and the last key are aligned */
};

typedef struct catalog_args {
    uint32_t struct_bytes; /* sizeof(catalog_args) as the caller compiled it */
    uint32_t abi_version;  /* CATALOG_ABI_VERSION */

    catalog_tensor q;   /* batch: (batch, nhead_q, seqlen_q, hdim_q); group: (tokens_q, nhead_q, hdim_q) */
    catalog_tensor k;   /* batch: (batch, nhead_k, seqlen_k, hdim_q); group: (tokens_k, nhead_k, hdim_q) */
    catalog_tensor v;   /* batch: (batch, nhead_k, seqlen_k, hdim_v); group: (tokens_k, nhead_k, hdim_v) */
    catalog_tensor o;   /* batch: (batch, nhead_q, seqlen_q, hdim_v); group: (tokens_q, nhead_q, hdim_v) */
    catalog_tensor lse; /* float32, natural logarithm; batch: (batch, nhead_q, seqlen_q); group: (nhead_q, tokens_q) */

    const int32_t* seqstart_q; /* group mode: batch + 1 first tokens, the last one is tokens_q; batch mode: NULL */
    const int32_t* seqstart_k;

    int64_t batch;
    int64_t nhead_q;
    int64_t nhead_k;  /* divides nhead_q: query head h reads key head h / (nhead_q / nhead_k) */
    int64_t seqlen_q; /* group mode: no sequence has more queries */
    int64_t seqlen_k;
    int64_t hdim_q;
    int64_t hdim_v;

    int64_t window_left;  /* keys visible to the left of the diagonal; -1: all, which a causal kernel insists on */
    int64_t window_right; /* keys visible to the right of the diagonal; -1: all; a causal kernel insists on 0 */
    int32_t mask_corner;  /* catalog_mask_corner: where the diagonal starts */

    float scale;         /* scores are scale * (q . k) before the softmax */
    int32_t num_threads; /* host targets: 0 = every core that the process may use */
    int32_t reserved;    /* 0 */
} catalog_args;

/* JSON of the catalog row that this library was built from; static storage, never NULL. */
const char* catalog_describe(void);

/* Run the kernel. `stream` is the device's stream or queue, NULL for its default; host targets ignore it and return when
 * the result is written. Returns a catalog_status. */
int32_t catalog_launch(const catalog_args* args, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* CATALOG_ABI_H */
