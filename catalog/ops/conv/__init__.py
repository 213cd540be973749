"""Grouped convolution: traits, names, problems and rows; forward, backward data and backward weight."""
