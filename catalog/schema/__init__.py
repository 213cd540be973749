"""What the catalog is made of: traits, kernels, names, arch specs, problems."""
