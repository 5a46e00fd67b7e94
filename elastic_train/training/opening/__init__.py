"""What a session needs from outside of its world, opened when it begins: saves, and what people see."""
