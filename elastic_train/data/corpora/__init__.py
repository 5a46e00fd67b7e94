"""Create datasets: from text, from docstrings, and synthetic ones."""
