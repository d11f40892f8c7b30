"""Model families: one file each, behind the protocol of base.py."""
