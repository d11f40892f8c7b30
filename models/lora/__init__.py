"""Adapters (LoRA; Hu et al. 2021, arXiv:2106.09685): a frozen base network, and what its roles add to it."""
