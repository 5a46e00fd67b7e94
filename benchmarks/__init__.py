"""Costs and savings of the product compared with peers; each module or package is a command."""
