"""Configuration: recipes, command lines, and what of both fits."""
