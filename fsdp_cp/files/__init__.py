"""Files that appear whole or not at all, JSON lines, and the check that a folder is this program's to write."""
