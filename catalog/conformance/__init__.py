"""What every arch must pass, whoever wrote its spec or its backend: rows and rules, then a kernel of each family."""
