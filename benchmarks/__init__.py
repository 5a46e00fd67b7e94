"""What the product costs and saves, beside its peers: each module or package is a command."""
