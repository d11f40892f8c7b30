"""A package of somebody else's, which adds a model family and a method: see docs/extending.md."""
