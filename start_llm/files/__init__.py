"""What every room needs to keep a cache in files. No knowledge of what is kept."""
