"""Other projects' models on the catalog's kernels: a module for each project, imported only when somebody uses it."""
