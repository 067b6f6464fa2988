"""Configuration: recipes, command lines, YAML files and their validation."""
