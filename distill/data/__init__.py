"""Data sets: base.py says what one is, settings.py which there are. Nothing is imported here: a process that reads
sound does without torch."""
