/* What every kernel library of the catalog exports, on every target: three C functions. They take the argument struct of
 * the operation, which its header operation/args.h defines; what is alike for all operations is here.
 *
 * All stages of a plan take the same struct; a kernel reads what its family has a use for. Its first members are
 *
 *     uint32_t struct_bytes;  sizeof(catalog_args) as the caller compiled it
 *     uint32_t abi_version;   CATALOG_ABI_VERSION
 *
 * Strides are in elements. The innermost axis of a tensor is contiguous, unless the operation says otherwise. A tensor
 * that is not used, or is optional and absent, has data == NULL. All pointers but `pool` are in the memory of the device
 * that the kernel runs on. A stride along an axis that a tensor has not, or whose elements all share, is 0.
 */
#ifndef CATALOG_ABI_H
#define CATALOG_ABI_H

#include <stdint.h>

#define CATALOG_ABI_VERSION 5

#ifndef CATALOG_ARGS_H /* a source may begin with its operation's header */
#include "operation/args.h" /* catalog_tensor, catalog_args, catalog_workspace */
#endif
#include "pool.h"
#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* JSON of the catalog row that this library was built from; static storage, never NULL. */
const char* catalog_describe(void);

/* What a launch with the sizes of `args` needs of workspaces that are dense; args->num_splits is how many splits the
 * caller would like, and nothing that a pointer points to is read. Kernels that share a workspace are asked in the order
 * in which they run, each with the num_splits of the one before. Returns a catalog_status. */
int32_t catalog_workspace_size(const catalog_args* args, catalog_workspace* size);

/* Run the kernel. `stream` is the device's stream or queue, NULL for its default; host targets ignore it and return when
 * the result is written. Returns a catalog_status. */
int32_t catalog_launch(const catalog_args* args, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* CATALOG_ABI_H */
