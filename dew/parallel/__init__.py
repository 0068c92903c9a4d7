"""One parallel algorithm per file, each with the bytes it moves."""
