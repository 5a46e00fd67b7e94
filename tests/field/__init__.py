"""Bugs that users of other trainers have reported in public, tried here. README.md lists each with the test that has
the right outcome; where a test of the product's own has it already, the list names that one."""
