"""What `CausalLM` trains: the package's own decoder, or a model of transformers."""
