"""Resources from outside a session's world, opened when it begins: saves, and displays for people."""
