"""What the outer server keeps on disk."""
