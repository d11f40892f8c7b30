"""What a run will hold, compute and send, told before there are GPUs for it."""
