"""One figure a room: each a function from a story, or from evidence, to SVG."""
