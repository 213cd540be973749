/* What functions of the catalog's libraries return. */
#ifndef CATALOG_STATUS_H
#define CATALOG_STATUS_H

enum catalog_status {
    CATALOG_OK           = 0,
    CATALOG_ABI_MISMATCH = 1, /* struct_bytes or abi_version differ from what the kernel was built with */
    CATALOG_BAD_ARGUMENT = 2, /* the call is outside of what this kernel was built for */
    CATALOG_NO_MEMORY    = 3, /* scratch memory could not be allocated */
    CATALOG_DEVICE_ERROR = 4, /* the device's runtime refused the launch */
    CATALOG_UNSUPPORTED  = 5, /* this machine lacks instructions of the kernel, or does not permit them */
};

#endif /* CATALOG_STATUS_H */
