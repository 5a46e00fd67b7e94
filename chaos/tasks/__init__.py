"""Tasks for soak tests: a paced text classifier, and versions with bugs planted in the product."""
