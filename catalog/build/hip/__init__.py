"""HIP compilers of this machine."""
