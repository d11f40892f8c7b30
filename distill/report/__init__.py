"""Report of a run: a page with its measures, pictures and verdict."""
