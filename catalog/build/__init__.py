"""From a row to a library: content keys, the cache of compiled kernels, the builder, and one folder per target."""
