"""What is made from a checkpoint."""
