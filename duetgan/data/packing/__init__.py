"""Pack images from sources into files, split them, find duplicates, and inspect packed files."""
