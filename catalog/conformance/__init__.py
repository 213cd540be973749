"""Conformance checks for every arch, whoever wrote its spec or backend: rows and rules, then a kernel per family."""
