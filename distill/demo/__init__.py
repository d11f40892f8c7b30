"""The page of ``python -m distill.demo``."""
