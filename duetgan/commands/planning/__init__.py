"""The quickstart's plan: it surveys the images, measures the machine, and chooses settings."""
