"""The page that a run ends with: its figures, its pictures, and what they show."""
