"""Model families: one file each, with the interface of base.py."""
