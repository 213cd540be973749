"""Attention: traits, problems, tensors, references and kernels."""
