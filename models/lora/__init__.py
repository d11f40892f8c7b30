"""Adapters (LoRA; Hu et al. 2021, arXiv:2106.09685) that roles add to a frozen base network."""
