"""External package that adds a model family and a method; see docs/extending.md."""
