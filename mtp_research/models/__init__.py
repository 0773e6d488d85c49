"""Target models: Hugging Face's own classes, opened to our attention contexts and nothing else."""
