"""The command line: one module for what people do with the catalog."""
