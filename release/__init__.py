"""What is published of a version: its files, what they depend on, and under which licences that is."""
