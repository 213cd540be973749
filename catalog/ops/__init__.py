"""Operations: what kernels compute. Each is a folder."""
