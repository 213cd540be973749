"""The command line: a module for each section of ``catalog --help``."""
