"""Parts of tasks for language: the models that `CausalLM` trains, and metrics."""
