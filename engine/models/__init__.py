"""Model directories: configuration, weights, and the import of GGUF files."""
